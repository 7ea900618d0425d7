"""What a user says of a simulation's input and targets, checked and as tensors."""

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
class Given:
    """What the user says of the tensor that enters layer 1; see `simulate`."""

    variance: float = 1.0
    correlation: float = 0.0
    token_ids: Any = None
    segment_ids: Any = None
    pixels: Any = None
    document_ids: Any = None

    @classmethod
    def of_encoder(cls, model: Transformer, given: Mapping[str, Any] | None) -> Given:
        """An encoder's, from `encoder_inputs`.

        Raises:
            DomainError: there is no encoder, or no such input.
        """
        if given is not None and model.encoder is None:
            raise DomainError("encoder_inputs describe an encoder's input: declare model.encoder")
        known = cls.__dataclass_fields__
        for name in given or ():
            if name not in known or name == "document_ids":
                raise domain_error("encoder_inputs", name, f"one of {', '.join(known)}")
        return cls(**(given or {}))

    @property
    def batch(self) -> int | None:
        """Sequences given; None: one, to be repeated, or none at all."""
        if self.pixels is not None:
            return None if np.ndim(self.pixels) < 4 else len(self.pixels)
        return None if np.ndim(self.token_ids) < 2 else len(self.token_ids)


def batch_of(batch: int, given: Sequence[Given]) -> int:
    """Sequences of a simulation.

    Raises:
        DomainError: a model and its encoder are given different numbers.
    """
    sizes = {size for each in given if (size := each.batch) is not None}
    if len(sizes) > 1:
        raise domain_error("token_ids", f"batches of {sorted(sizes)}", "as many for either model")
    return sizes.pop() if sizes else batch


def entering(
    model: Transformer, given: Given, batch: int, device: Any, dtype: Any, joint: bool
) -> Input:
    """The input of one model.

    Raises:
        DomainError: an input that the model's embedding does not read, or is malformed.
    """
    check_moments("", given.variance, given.correlation, model.seq_len)
    embedding = model.embedding
    joint = joint or given.batch is not None
    documents = _documents(model, given, batch, device)
    if given.pixels is not None:
        read = torch.as_tensor(_pixels(model, given.pixels, batch), device=device, dtype=dtype)
        return Input(read=read, joint=joint)
    if given.token_ids is None:
        moments = float(given.variance), float(given.correlation)
        return Input(moments, joint=joint, documents=documents)
    if embedding is None or isinstance(embedding, PatchEmbedding | SoundEmbedding):
        raise DomainError("token_ids need tables to be looked up in: declare model.embedding")
    ids = _ids(model, given.token_ids, batch, "token_ids")
    if ids.max() >= embedding.vocab_size:
        allowed = f"below vocab_size = {embedding.vocab_size}"
        raise domain_error("token_ids", int(ids.max()), allowed)
    segments = None
    if given.segment_ids is not None:
        segments = torch.as_tensor(
            _ids(model, given.segment_ids, batch, "segment_ids"), device=device
        )
    read = torch.as_tensor(ids, device=device)
    return Input(read=read, segment_ids=segments, joint=joint, documents=documents)


def _documents(model: Transformer, given: Given, batch: int, device: Any) -> Tensor | None:
    if given.document_ids is None:
        return None
    if model.encoder is not None or given.pixels is not None:
        raise DomainError("document_ids pack texts of one stack: leave encoder and pixels out")
    if model.head is not None and model.head.loss == "classification":
        raise DomainError("document_ids pack texts by token: not with a classifier")
    ids = _ids(model, given.document_ids, batch, "document_ids")
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
    model: Transformer, targets: Any, given: Input, batch: int, seed: int, device: Any
) -> Tensor | None:
    """What the model's loss is to predict: (batch, L), or (batch,) classes; None: no loss.

    Where nothing is given, a causal head predicts the next of the tokens it read, and for sequences
    of one token, whose next is beyond them, any. Other targets are
    drawn once: classes alike often, tokens by Zipf's law, at a share of the places if masked.

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
        read = given.read
        tokens = None if read is None or read.is_floating_point() else read.cpu().numpy()
        found = _drawn_targets(model, tokens, shape, count, np.random.default_rng((seed, count)))
        shifted = model.head.loss == "causal" and model.seq_len > 1
        if shifted and given.documents is not None:
            found[given.last_of_document.cpu().numpy()] = NO_TARGET
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
    often = 1 / np.arange(1, count + 1)
    found = random.choice(count, shape, p=often / often.sum())
    if model.head.loss == "causal" and model.seq_len == 1:
        return found
    if model.head.loss == "causal":
        found = found if tokens is None else tokens
        return np.concatenate([found[:, 1:], np.full((len(found), 1), NO_TARGET)], axis=1)
    wanted = max(1, round(model.head.target_share * found.size))
    chosen = np.zeros(found.size, dtype=bool)
    chosen[random.permutation(found.size)[:wanted]] = True
    return np.where(chosen.reshape(shape), found, NO_TARGET)
