"""A simulation's input and targets, checked and as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..engine.layout import check_documents
from ..errors import DomainError, domain_error
from ..layers.embedding import check_ids
from ..layers.head.targets import NO_TARGET
from ..layers.images import check_pixels
from ..model.patches import PatchEmbedding, SoundEmbedding
from ..model.transformer import Transformer
from ..prediction.stack import check_moments
from .output import vocabulary
from .twin import Input


@dataclass(frozen=True, eq=False)
class InputArguments:
    """The user's description of layer 1's input; see `simulate`."""

    variance: float = 1.0
    correlation: float = 0.0
    token_ids: Any = None
    segment_ids: Any = None
    pixels: Any = None
    document_ids: Any = None

    @classmethod
    def of_encoder(cls, model: Transformer, inputs: Mapping[str, Any] | None) -> InputArguments:
        """The description of an encoder's input, from `encoder_inputs`.

        Raises:
            DomainError: there is no encoder, or no such argument.
        """
        if inputs is not None and model.encoder is None:
            raise DomainError("encoder_inputs describe an encoder's input: declare model.encoder")
        known = cls.__dataclass_fields__
        for name in inputs or ():
            if name not in known or name == "document_ids":
                raise domain_error("encoder_inputs", name, f"one of {', '.join(known)}")
        return cls(**(inputs or {}))

    @property
    def batch(self) -> int | None:
        """Number of sequences; None: one sequence, to be repeated, or Gaussian tokens."""
        if self.pixels is not None:
            return None if np.ndim(self.pixels) < 4 else len(self.pixels)
        return None if np.ndim(self.token_ids) < 2 else len(self.token_ids)


def batch_of(batch: int, given: Sequence[InputArguments]) -> int:
    """Number of sequences of a simulation.

    Raises:
        DomainError: inputs of a model and its encoder differ in number.
    """
    sizes = {size for arguments in given if (size := arguments.batch) is not None}
    if len(sizes) > 1:
        raise domain_error("token_ids", f"batches of {sorted(sizes)}", "as many for either model")
    return sizes.pop() if sizes else batch


def input_of(
    model: Transformer, arguments: InputArguments, batch: int, device: Any, dtype: Any, joint: bool
) -> Input:
    """The input of one model.

    Raises:
        DomainError: an input that is malformed, or that the model's embedding does not take.
    """
    check_moments("", arguments.variance, arguments.correlation, model.seq_len)
    embedding = model.embedding
    joint = joint or arguments.batch is not None
    documents = _documents(model, arguments, batch, device)
    if arguments.pixels is not None:
        read = torch.as_tensor(_pixels(model, arguments.pixels, batch), device=device, dtype=dtype)
        return Input(read=read, joint=joint)
    if arguments.token_ids is None:
        moments = float(arguments.variance), float(arguments.correlation)
        return Input(moments, joint=joint, documents=documents)
    if embedding is None or isinstance(embedding, PatchEmbedding | SoundEmbedding):
        raise DomainError("token_ids need tables to be looked up in: declare model.embedding")
    ids = _ids(model, arguments.token_ids, batch, "token_ids")
    if ids.max() >= embedding.vocab_size:
        allowed = f"below vocab_size = {embedding.vocab_size}"
        raise domain_error("token_ids", int(ids.max()), allowed)
    segments = None
    if arguments.segment_ids is not None:
        segments = torch.as_tensor(
            _ids(model, arguments.segment_ids, batch, "segment_ids"), device=device
        )
    read = torch.as_tensor(ids, device=device)
    return Input(read=read, segment_ids=segments, joint=joint, documents=documents)


def _documents(
    model: Transformer, arguments: InputArguments, batch: int, device: Any
) -> Tensor | None:
    if arguments.document_ids is None:
        return None
    if model.encoder is not None or arguments.pixels is not None:
        raise DomainError("document_ids pack texts of one stack: leave encoder and pixels out")
    if model.head is not None and model.head.loss == "classification":
        raise DomainError("document_ids pack texts by token: not with a classifier")
    ids = _ids(model, arguments.document_ids, batch, "document_ids")
    return torch.as_tensor(check_documents(ids, ids.shape), device=device)


def _ids(model: Transformer, ids: Any, batch: int, name: str) -> np.ndarray:
    found = check_ids(ids, model.seq_len, name).astype(np.int64)
    if len(found) == 1:
        found = np.repeat(found, batch, axis=0)
    if len(found) != batch:
        raise domain_error(name, f"{len(found)} sequences", f"{batch} sequences")
    return found


def _pixels(model: Transformer, pixels: Any, batch: int) -> np.ndarray:
    embedding = model.embedding
    if not isinstance(embedding, PatchEmbedding | SoundEmbedding):
        raise DomainError("pixels need patches: declare model.embedding as a PatchEmbedding")
    images = check_pixels(embedding, pixels)
    if model.seq_len != embedding.seq_len:
        raise domain_error("seq_len", model.seq_len, f"the embedding's {embedding.seq_len} tokens")
    return images if np.ndim(pixels) == 4 else np.repeat(images, batch, axis=0)


def targets_of(
    model: Transformer, targets: Any, source: Input, batch: int, seed: int, device: Any
) -> Tensor | None:
    """The targets of the loss: (batch, L), or (batch,) classes; None: no loss.

    By default, the targets of a causal head are the next input tokens; all other targets, also of
    sequences of one token, are drawn once: classes uniformly, tokens by Zipf's law, for a masked
    head at a share of the positions.

    Raises:
        DomainError: targets without a loss, or malformed ones.
    """
    head = model.head
    if head is None or head.loss is None:
        if targets is not None:
            raise DomainError("targets are those of a loss: declare model.head with one")
        return None
    count = vocabulary(model)
    shape = (batch,) if head.loss == "classification" else (batch, model.seq_len)
    if targets is None:
        read = source.read
        tokens = None if read is None or read.is_floating_point() else read.cpu().numpy()
        found = _drawn_targets(model, tokens, shape, count, np.random.default_rng((seed, count)))
        shifted = model.head.loss == "causal" and model.seq_len > 1
        if shifted and source.documents is not None:
            found[source.last_of_document.cpu().numpy()] = NO_TARGET
    else:
        found = np.asarray(targets)
        if head.loss != "classification" and found.ndim == 1:
            found = np.repeat(found[None], batch, axis=0)
    whole = np.issubdtype(found.dtype, np.integer)
    if found.shape != shape or not whole:
        raise domain_error("targets", f"{found.dtype} {found.shape}", f"integers of shape {shape}")
    real = found[found != NO_TARGET]
    if real.size == 0 or real.min() < 0 or real.max() >= count:
        raise domain_error("targets", targets, f"from 0 to {count - 1}, or {NO_TARGET} for none")
    return torch.as_tensor(found.astype(np.int64), device=device)


def _drawn_targets(
    model: Transformer,
    tokens: np.ndarray | None,
    shape: tuple[int, ...],
    count: int,
    random: np.random.Generator,
) -> np.ndarray:
    if model.head.loss == "classification":
        return random.integers(count, size=shape)
    frequency = 1 / np.arange(1, count + 1)
    found = random.choice(count, shape, p=frequency / frequency.sum())
    if model.head.loss == "causal" and model.seq_len == 1:
        return found
    if model.head.loss == "causal":
        found = found if tokens is None else tokens
        return np.concatenate([found[:, 1:], np.full((len(found), 1), NO_TARGET)], axis=1)
    masked = max(1, round(model.head.target_share * found.size))
    chosen = np.zeros(found.size, dtype=bool)
    chosen[random.permutation(found.size)[:masked]] = True
    return np.where(chosen.reshape(shape), found, NO_TARGET)
