"""The engine: one pass forward through a declaration, one pass backward, and the trace of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import DomainError
from .bottom_to_top import Sum
from .composition import BottomToTop, Chain, Component, Layer, Leaf, Parallel, Reader, Residual
from .directions import (
    at_tokens,
    grouped_persistence,
    isotropic,
    orthogonal_parts,
    persistence,
    shared_persistence,
)
from .marks import grouped_norm, mixes_tokens, normalises, packed, splits
from .realised import summed
from .state import Array, Gradient, Kernel, Signal, ratio_or_zero
from .trace import Norms, Point, Trace

__all__ = ["BackwardPass", "Point", "Trace", "forward", "start"]

BackwardPass = Callable[[Gradient], Gradient]


def forward(component: Component, signal: Signal, trace: Trace) -> tuple[Signal, BackwardPass]:
    """Carry a signal through a declaration, recording every site in `trace`.

    Returns the output and the backward pass, which carries a gradient at the output back to the
    input and fills in the trace's gradients.
    """
    walk = _WALKS.get(type(component))
    if walk is not None:
        return walk(component, signal, trace)
    if isinstance(component, Reader):
        return _reader(component, signal, trace)
    return _leaf(component, signal, trace)  # type: ignore[arg-type]


def start(signal: Signal, trace: Trace) -> None:
    """Record the tensor that enters layer 1."""
    trace.points.append(Point(0, "stream", signal))


def _recorded(trace: Trace, site: str, output: Signal, back: BackwardPass) -> BackwardPass:
    point = Point(trace.layer, site, output)
    trace.points.append(point)

    def backward(gradient: Gradient) -> Gradient:
        point.gradient = gradient
        return back(gradient)

    return backward


def _leaf(leaf: Leaf, signal: Signal, trace: Trace) -> tuple[Signal, BackwardPass]:
    output, pullback = leaf.forward(signal)
    layer = trace.layer
    point = Point(layer, leaf.label, output)
    trace.points.append(point)

    def backward(gradient: Gradient) -> Gradient:
        point.gradient = gradient
        pulled = pullback(gradient)
        if pulled.weights is not None:
            trace.norms.append(Norms(layer, pulled, signal))
        return pulled.gradient

    return output, backward


def _layer(layer: Layer, signal: Signal, trace: Trace) -> tuple[Signal, BackwardPass]:
    trace.layer = layer.number
    output, back = forward(layer.body, signal, trace)
    if trace.on_layer is None:
        return output, _recorded(trace, layer.label, output, back)
    passed = trace.on_layer
    passed()

    def counted(gradient: Gradient) -> Gradient:
        sent = back(gradient)
        passed()
        return sent

    return output, _recorded(trace, layer.label, output, counted)


def _chain(chain: Chain, signal: Signal, trace: Trace) -> tuple[Signal, BackwardPass]:
    passes: list[BackwardPass] = []
    for part in chain.parts:
        signal, back = forward(part, signal, trace)
        passes.append(back)

    def backward(gradient: Gradient) -> Gradient:
        for back in reversed(passes):
            gradient = back(gradient)
        return gradient

    return signal, backward


def _added(signal: Signal, branch: Signal, skip: Any, scale: Any) -> Signal:
    """Sum of two tensors of independent directions, their kernels times `skip` and `scale`."""
    output = Signal(
        signal.kernel.mixed(skip, branch.kernel, scale), signal.seq_len, width=signal.width
    )
    if signal.spread is not None and branch.spread is not None:
        # |T + B|^2 = |T|^2 + |B|^2 + 2 T.B with E (T_i.B_i)(T_j.B_j) = d T_ij B_ij.
        norms = signal.spread.mixed(skip * skip, branch.spread, scale * scale)
        cross = 4 * skip * scale / signal.width
        output.spread = norms.mixed(1.0, signal.kernel * branch.kernel, cross)
        found = summed(signal, branch, skip, scale)
        if found is not None:
            output.realised, shared = found
            output.spread = output.spread + shared
    return output


def _residual_sum(node: Residual, signal: Signal, branch: Signal) -> Signal:
    skip, scale = _square(node.skip_scale), _square(node.branch_scale)
    output = _added(signal, branch, skip, scale)
    if output.spread is not None:
        output.centred = None if signal.centred is None else signal.centred.scaled(skip)
    return output


def _residual(node: Residual, signal: Signal, trace: Trace) -> tuple[Signal, BackwardPass]:
    branch, back = forward(node.branch, signal, trace)
    skip, scale = _square(node.skip_scale), _square(node.branch_scale)
    scale_free = not normalises(node.branch)
    output = _residual_sum(node, signal, branch)

    def backward(gradient: Gradient) -> Gradient:
        kept = gradient.kernel.scaled(skip)
        handed = gradient.kernel.scaled(scale)
        if signal.spread is None:
            returned = back(gradient.with_kernel(handed)).kernel
            return _merge(gradient, kept, returned, scale_free)
        if scale_free:
            gradient = gradient.averaged()
            total = output.kernel.mean_diagonal()
            share = ratio_or_zero(branch.kernel.mean_diagonal() * scale, total)
            sent = back(gradient.at_part(handed, share))
            returned = sent.kernel
            if isotropic(gradient.radial):
                return _merge(gradient, kept, returned, scale_free)
            kept, returned = orthogonal_parts(
                signal, share, gradient, kept, sent, mixes_tokens(node.branch)
            )
            merged = _merge(gradient, kept, returned, scale_free)
            if not gradient.orthogonal:
                # u.g of the sum u is x.g of its addend x, of a branch of degree 1
                kept_share = ratio_or_zero(kept.mean_diagonal(), merged.kernel.mean_diagonal())
                merged.radial = gradient.radial * kept_share * ratio_or_zero(1.0, 1.0 - share)
            return merged
        added = branch.kernel.diagonal * output.kernel.lift(scale)[0]
        share = ratio_or_zero(added, output.kernel.diagonal)
        part = gradient.at_part(handed, share)
        response = (1.0 - share) * gradient.norm_response
        held = 1.0 - output.kernel.mean_share(added)
        passed = tuple((w, held * one) for w, one in gradient.grouped)
        part.persistence = _persistence(signal, response, passed, node.branch, gradient.kernel)
        returned = _returned(back(part).kernel, part, node.branch, signal.width)
        merged = _merge(gradient, kept, returned, scale_free)
        kept_share = ratio_or_zero(kept.diagonal, merged.kernel.diagonal)
        # (x.g)^2, which the branch does not change: its norm sends back nothing along x
        merged.radial = kept_share * (share + (1.0 - share) * gradient.radial)
        merged.norm_response = response + 1.0 - kept_share
        if grouped_norm(node.branch) is not None:
            kept_share = ratio_or_zero(kept.mean_diagonal(), merged.kernel.mean_diagonal())
            through = tuple((kept_share * w, one) for w, one in passed)
            merged.grouped = (*through, (1.0 - kept_share, 1.0))
        return merged

    return output, _recorded(trace, node.label, output, backward)


def _parallel(node: Parallel, signal: Signal, trace: Trace) -> tuple[Signal, BackwardPass]:
    passes = [forward(branch, signal, trace) for branch in node.branches]
    output = passes[0][0]
    for branch, _ in passes[1:]:
        output = _added(output, branch, 1.0, 1.0)

    def backward(gradient: Gradient) -> Gradient:
        if signal.spread is None:
            kernels = [back(gradient.with_kernel(gradient.kernel)).kernel for _, back in passes]
        else:
            kernels = []
            for (found, back), branch in zip(passes, node.branches, strict=True):
                share = ratio_or_zero(found.kernel.diagonal, output.kernel.diagonal)
                part = gradient.at_part(gradient.kernel, share)
                part.persistence = gradient.persistence
                kernels.append(_returned(back(part).kernel, part, branch, signal.width))
        total = kernels[0]
        for kernel in kernels[1:]:
            total = total + kernel
        return Gradient(total, gradient.seq_len)

    return output, backward


def _bottom_to_top(node: BottomToTop, signal: Signal, trace: Trace) -> tuple[Signal, BackwardPass]:
    between, back_attention = forward(node.attention, signal, trace)
    entering, back_norm = forward(node.norm, between, trace)
    branch, back_ffn = forward(node.ffn.branch, entering, trace)
    inner = _residual_sum(node.ffn, entering, branch)
    carried = np.sqrt(entering.kernel.diagonal / between.kernel.diagonal)
    carried = carried * node.attention.skip_scale * node.ffn.skip_scale
    total = Sum(node, signal, between, entering, inner, carried)
    output = total.output()

    def to_entering(gradient: Gradient) -> Gradient:
        return total.at_entering(output, gradient, back_ffn)

    back_inner = _recorded(trace, node.ffn.label, inner, to_entering)

    def backward(gradient: Gradient) -> Gradient:
        sent = back_attention(back_norm(back_inner(gradient)))
        return total.returned(output, gradient, sent)

    return output, _recorded(trace, node.label, output, backward)


def _reader(node: Reader, signal: Signal, trace: Trace) -> tuple[Signal, BackwardPass]:
    if trace.memory is None:
        raise DomainError("cross-attention has nothing to read: declare model.encoder")
    memory = trace.memory
    output, pullback = node.attend(signal, memory)
    layer = trace.layer
    point = Point(layer, node.label, output)
    trace.points.append(point)

    def backward(gradient: Gradient) -> Gradient:
        point.gradient = gradient
        pulled, to_memory = pullback(gradient)
        trace.memory_gradients.append(to_memory)
        if pulled.weights is not None:
            trace.norms.append(Norms(layer, pulled, memory))
        return pulled.gradient

    return output, backward


def _returned(returned: Kernel, part: Gradient, branch: Component, width: Array) -> Kernel:
    """What a normalised branch sends back, with what norms that persist and directions do to it.

    Attention returns averages of what other tokens receive: of the growth, what they share. Its
    values lose the average's direction, (1 - radial)/width; entrywise units lose theirs where they
    are, and what lies along the token itself is the normalisation's to remove.
    """
    if part.persistence is None or splits(branch):
        return returned
    grown, shared = part.persistence
    if not mixes_tokens(branch):
        return returned.weighted(1 + grown.diagonal, 1 + grown.pairs)
    lost, _ = returned.lift((1 - part.averaged().radial) / width)
    one, first, second = at_tokens(returned, 1 + shared - lost)
    return returned.weighted(one, (first + second) / 2)


def _persistence(
    signal: Signal,
    response: Array,
    passed: tuple[tuple[Array, Array], ...],
    branch: Component,
    above: Kernel,
) -> tuple[Kernel, Array]:
    norm = grouped_norm(branch)
    if norm is None:
        shared = shared_persistence(signal, response, above, packed(branch))
        return persistence(signal, response), shared
    of_groups = grouped_persistence(signal, passed, norm.groups, norm.freedom(signal.width))
    grown = persistence(signal, response, own=False) + of_groups
    tokens = grown.pairs.shape[-1] if grown.resolved is True else signal.seq_len
    return grown, grown.lift(grown.total(tokens) / tokens**2)[0]


def _merge(gradient: Gradient, kept: Kernel, returned: Kernel, scale_free: bool) -> Gradient:
    """Add the gradient that came through the branch to the one the skip connection kept.

    The sum stays orthogonal to the signal if it was so above and the branch scales with its input,
    that is, holds no normalisation (exact for ReLU networks, to leading order for attention, whose
    logits do not scale).
    """
    total = kept + returned
    share = ratio_or_zero(kept.mean_diagonal(), total.mean_diagonal())
    return Gradient(
        total,
        gradient.seq_len,
        radial=0.0 if gradient.orthogonal and scale_free else 1.0,
        centred_share=gradient.centred_share * share,
    )


def _square(scale: Any) -> Any:
    return scale * scale


_WALKS: dict[type, Callable[..., tuple[Signal, BackwardPass]]] = {
    Chain: _chain,
    Residual: _residual,
    Layer: _layer,
    Parallel: _parallel,
    BottomToTop: _bottom_to_top,
}
