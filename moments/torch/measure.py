"""A real module on a real input, measured by hooks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..engine.layout import restarted
from ..errors import DomainError, domain_error
from ..formulas.checks import check_count
from ..layers.head.targets import NO_TARGET
from ..prediction.draws import Draw, WeightGradient
from ..prediction.measurement import Measurement
from ..simulation.collector import Collector, squared_norm
from .anatomy import Measured, anatomy_of, measured_parts
from .roles import ENCODER, HookPoint
from .running import (
    as_named,
    batch_first,
    built,
    device_of,
    first_tensor,
    grouped,
    hooked,
    in_mode,
    module_logits,
    module_loss,
    on_device,
    restored_buffers,
    unfrozen,
    watch_tensor,
)
from .scales import ScaleBranch

Loss = Callable[[Any, Any], Tensor]

# Ends of names of classes that need labels in the batch -> the function that makes such a batch
_NEED_LABELS = {
    ("ForMaskedLM", "ForPreTraining"): "moments.torch.text.mask_tokens",
    ("ForConditionalGeneration", "ForImageClassification"): (
        "moments.torch.huggingface_modules.module_batch"
    ),
}


def measure(
    module: nn.Module | Callable[[int], nn.Module],
    batch: Any = None,
    *,
    loss: Loss | None = None,
    seeds: int = 1,
    seed: int = 0,
    progress: bool = False,
    parts: Measured | None = None,
) -> Measurement:
    """Run a real module in training mode and measure every site, forward and backward.

    The module and torch's random state are left as they were. Gradients pass frozen parameters,
    which have no weight gradients of their own.

    Args:
        module: any that can be read from one pass; of compiled and data-parallel modules the
            module inside is measured. With a module its weights stay as they are and the draws
            differ in dropout alone, so that standard errors say nothing about other weights; with a
            factory, called with seed, seed + 1, ..., every draw has fresh weights.
        batch: keyword arguments of the module as a mapping of arrays or tensors, or its one
            positional argument; None: random input. Tokens that `attention_mask` or
            `src_key_padding_mask` exclude are excluded from every moment; of a decoder with an
            encoder, those that `decoder_attention_mask` excludes. If `position_ids` restart, rows
            are packed, and token pairs are those of one document; whether the module's attention
            respects that is up to it (most need a mask of shape (B, 1, L, L) as well).
        loss: takes the module's output and the batch as tensors, returns a scalar. None: the
            module's own loss, which may be the one scalar among its outputs; a causal head
            without labels predicts the next token; a module without a loss gets a white gradient
            of variance 1 at its output.
        seeds: draws.
        seed: of the draws; the same seed on the same device gives the same result.
        progress: write one line per draw to standard error.
        parts: hook points and parts of parameters, as of `measured_parts`; None: as it is read.

    Returns:
        A Measurement, with the encoder's as its `encoder` where there are two stacks. Its
        `logit_variance` is the mean squared logit; weight gradients, of every parameter, are of the
        loss on the whole batch.

    Raises:
        DomainError: an argument out of range, or a module whose task needs labels without them.
        MomentsError: the module cannot be read, or a tensor is not differentiable.
    """
    check_count("seeds", seeds)
    check_count("seed", seed, least=0)
    if batch is None:
        target = built(module, seed)
        batch = anatomy_of(target).example
    elif not isinstance(batch, Mapping | Tensor):
        batch = as_named(built(module, seed), batch)
    draws, name, size = [], "", 0
    for draw in range(seeds):
        with torch.random.fork_rng():
            target = built(module, seed + draw)
            state = np.random.SeedSequence((seed, draw)).generate_state(1)[0]
            torch.manual_seed(int(state))
            parts = measured_parts(target, batch) if parts is None else parts
            result, size = one_draw(target, batch, loss, parts)
        draws.append(result)
        name = type(target).__name__
        if progress:
            print(f"draw {draw + 1} of {seeds}", file=sys.stderr)
    return Measurement.from_draws(draws, batch=size, source=name)


def one_draw(module: nn.Module, batch: Any, loss: Loss | None, parts: Measured) -> tuple[Draw, int]:
    """Measure one pass forward and backward; return it with the number of sequences."""
    points, weights = parts
    inputs = Inputs.of(module, batch, loss)
    first = batch_first(module)
    main, encoder = (
        Collector(inputs.counted(stack, points), batch_first=first) for stack in ("", ENCODER)
    )
    hooks = (
        hook
        for stack, collector in (("", main), (ENCODER, encoder))
        for hook in _watched(module, _of_stack(points, stack), collector)
    )
    with restored_buffers(module), in_mode(module, True), unfrozen(module), hooked(hooks):
        result = inputs.run()
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        ends = [*parameters.values(), *inputs.differentiable()]
        gradients = torch.autograd.grad(result.top, ends, result.cotangent, allow_unused=True)
    of = dict(zip(parameters, gradients, strict=False))
    norms = {
        row: 0.0 if (g := of[row.parameter]) is None else squared_norm(part.of(g))
        for row, part in weights
    }
    encoder_draw = None
    if encoder.signal:
        encoder_draw = Draw(encoder.signal, encoder.gradient, _of_encoder(norms, True))
    logits = result.logits
    draw = Draw(
        signal=main.signal,
        gradient=main.gradient,
        weight_gradients=_of_encoder(norms, False),
        loss=float(result.top.detach()) if result.cotangent is None else None,
        logit_variance=None if logits is None else squared_norm(logits) / logits.numel(),
        encoder=encoder_draw,
    )
    return draw, main.sequences


def _watched(
    module: nn.Module, points: Iterable[HookPoint], collector: Collector
) -> Iterator[RemovableHandle]:
    """Hooks that pass the tensor at every point to the collector."""
    modules = dict(module.named_modules())
    for (path, side), group in grouped(points, lambda point: (point.path, point.side)).items():
        part = modules[path]
        # A block's output is measured before the hook that scales it.
        scaled = any(isinstance(hook, ScaleBranch) for hook in part._forward_hooks.values())
        places = [(point.layer, point.site) for point in group]
        keep = functools.partial(collector.watch, places=places)
        yield watch_tensor(part, side, keep, first=scaled and side == "output")


def _of_stack(points: Iterable[HookPoint], stack: str) -> list[HookPoint]:
    """The points of one stack, without its prefix."""
    return [
        point._replace(site=point.site.removeprefix(ENCODER))
        for point in points
        if point.site.startswith(ENCODER) == bool(stack)
    ]


def _of_encoder(
    norms: Mapping[WeightGradient, float], encoder: bool
) -> dict[WeightGradient, float]:
    """Rows of the encoder's parameters, or of all others, without the prefix."""
    return {
        row._replace(weight=row.weight.removeprefix(ENCODER)): norm
        for row, norm in norms.items()
        if row.weight.startswith(ENCODER) == encoder
    }


class Pass(NamedTuple):
    """One pass: the tensor that is differentiated, its cotangent (None for a scalar loss), and the
    logits, if there are any."""

    top: Tensor
    cotangent: Tensor | None
    logits: Tensor | None


@dataclass
class Inputs:
    """The input of a module, on its device; real tensors other than masks require gradients.

    Attributes:
        labels: next tokens that were added for a causal head, if the batch had none.
    """

    module: nn.Module
    loss: Loss | None
    positional: list[Tensor]
    named: dict[str, Any]
    labels: Tensor | None = None

    @classmethod
    def of(cls, module: nn.Module, batch: Any, loss: Loss | None) -> Inputs:
        """The input of a batch, with labels if the module needs them.

        Raises:
            DomainError: no batch, or one without the labels that the module needs.
        """
        device = device_of(module)

        def tensor(value: Any, name: str) -> Any:
            moved = on_device(value, device)
            if isinstance(moved, Tensor) and moved.is_floating_point() and "mask" not in name:
                # A clone is no leaf, so that hooks on the tensor see its gradient.
                return moved.detach().clone().requires_grad_().clone()
            return moved

        if isinstance(batch, Mapping):
            result = cls(module, loss, [], {n: tensor(value, n) for n, value in batch.items()})
        elif isinstance(value := tensor(batch, ""), Tensor):
            result = cls(module, loss, [value], {})
        else:
            allowed = "an array, a tensor or a mapping of them"
            raise domain_error("batch", type(batch).__name__, allowed)
        if loss is None and "labels" not in result.named:
            result._add_labels()
        return result

    def _add_labels(self) -> None:
        """Add next tokens as the labels of a causal head."""
        kind = type(self.module).__name__
        if kind.endswith(("ForCausalLM", "LMHeadModel")):
            ids = self.named.get("input_ids", self.positional[0] if self.positional else None)
            if ids is not None:
                documents = self._documents()
                if documents is not None:
                    # The first token of a document is no target.
                    first = torch.ones_like(documents, dtype=torch.bool)
                    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
                    ids = ids.masked_fill(first, NO_TARGET)
                self.named["labels"] = self.labels = ids
            return
        for ends, maker in _NEED_LABELS.items():
            if kind.endswith(ends):
                raise DomainError(
                    f"batch has no 'labels' and {kind} cannot make its own: pass "
                    f"them along with the inputs, as {maker} makes them, or a loss"
                )

    def differentiable(self) -> list[Tensor]:
        values = [*self.positional, *self.named.values()]
        return [v for v in values if isinstance(v, Tensor) and v.requires_grad]

    def run(self, what: str = "") -> Pass:
        """One differentiable pass; a DomainError if `what` needs a loss and there is none."""
        output = self.module(*self.positional, **self.named)
        logits = module_logits(output)
        if self.loss is not None:
            scalar = self.loss(output, self.named or self.positional[0])
            if not isinstance(scalar, Tensor) or scalar.numel() != 1:
                raise domain_error("loss", type(scalar).__name__, "a function returning one scalar")
            return Pass(scalar, None, logits)
        if (own := module_loss(output)) is not None:
            return Pass(_next_token_loss(own, logits, self.labels), None, logits)
        if what:
            raise DomainError(f"{what} needs a loss: pass labels in the batch, or a loss")
        top = getattr(output, "last_hidden_state", None)
        top = first_tensor(output) if top is None else top
        return Pass(top, torch.randn_like(top), logits)

    def _documents(self) -> Tensor | None:
        """(batch, L) document numbers of packed rows, whose `position_ids` restart; None: not
        packed."""
        positions, ids = self.named.get("position_ids"), self.named.get("input_ids")
        if not isinstance(positions, Tensor):
            return None
        mask = self.named.get("attention_mask")
        mask = mask.cpu().numpy() if isinstance(mask, Tensor) else None
        result = restarted(positions.cpu().numpy(), mask)
        if result is None:
            return None
        rows = len(result) if ids is None else len(ids)
        return torch.as_tensor(
            np.broadcast_to(result, (rows, result.shape[1])).copy(), device=positions.device
        )

    def counted(self, stack: str, points: Iterable[HookPoint]) -> Tensor | None:
        """(batch, L) false at padding of a stack, or document numbers; None without either."""
        if (documents := self._documents()) is not None:
            return documents
        two = any(point.site.startswith(ENCODER) for point in points)
        mask = self.named.get("decoder_attention_mask" if two and not stack else "attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all()):
            return mask.bool()
        padding = self.named.get("src_key_padding_mask")
        if isinstance(padding, Tensor):
            return ~padding if padding.dtype == torch.bool else padding == 0
        return None


def _next_token_loss(loss: Tensor, logits: Tensor | None, labels: Tensor | None) -> Tensor:
    """The loss of the next token; if a class does not shift labels itself, as decoders with an
    encoder do not, it is computed here."""
    if labels is None or logits is None or logits.shape[:2] != labels.shape:
        return loss
    entropy = functools.partial(nn.functional.cross_entropy, ignore_index=NO_TARGET)
    unshifted = entropy(logits.flatten(0, 1).float(), labels.flatten())
    value = float(loss.detach())
    if abs(float(unshifted.detach()) - value) > 1e-5 * abs(value):
        return loss
    return entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def needs_labels(kind: str) -> bool:
    """Whether a Hugging Face module of this class name has no loss without labels."""
    return any(kind.endswith(ends) for ends in _NEED_LABELS)
