"""Faults in the construction of a module: memory never written, truncation without effect."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..show.findings import Finding
from ..show.health import call_factory
from .roles import gathered_names

CUT = 6.0
"""Standard deviations from which a bound truncates (almost) nothing: two entries of a billion."""

ODD = 1e-2
"""Share of implausible entries from which a tensor counts as never written."""

SMALL, LARGE = 1e-30, 1e15
"""Entries of smaller or larger size are implausible: stale memory, not an initialisation."""

_SEEN: WeakKeyDictionary[nn.Module, tuple[Finding, ...]] = WeakKeyDictionary()


def constructed(factory: Callable[[], Any]) -> tuple[Any, Any]:
    """The module and perhaps the batch of a factory; findings are stored for `seen_of`."""
    with watched() as cut:
        module, batch = call_factory(factory)
    if isinstance(module, nn.Module):
        _SEEN[module] = tuple(_uncut(cut))
    return module, batch


def seen_of(module: nn.Module) -> tuple[Finding, ...]:
    """Findings from the time when a module was made, and on how it is put together."""
    return (*_SEEN.get(module, ()), *_repeated(module))


def _repeated(module: nn.Module) -> Iterator[Finding]:
    """Lists that hold one submodule several times, as `[block] * 12` does; in transformers' own
    models that is meant."""
    if type(module).__module__.startswith("transformers."):
        return
    for path, part in module.named_modules():
        if not isinstance(part, nn.ModuleList | nn.Sequential):
            continue
        entries = [one for one in part if one is not None and any(True for _ in one.parameters())]
        distinct = len({id(one) for one in entries})
        if distinct < len(entries):
            numbers, names = (distinct, len(entries)), (path or "the module",)
            why = f"its {len(entries)} entries are {distinct} object{'s' * (distinct > 1)}, so "
            why += "that layers share their weights"
            mend = "build every layer anew: nn.ModuleList(Block(...) for _ in range(layers)), not "
            mend += "[block] * layers"
            yield Finding("warning", "one block several times", names, (), *numbers, why, mend)


@contextmanager
def watched() -> Iterator[list[tuple[str, float, float]]]:
    """Within the context, fill uninitialised memory with nan, and list truncated draws with bounds
    beyond `CUT` standard deviations: place in the code, standard deviation and bound.

    `torch.utils.deterministic.fill_uninitialized_memory` fills the memory of torch.empty and
    `to_empty` while deterministic algorithms are enabled.
    """
    cut: list[tuple[str, float, float]] = []
    draw = getattr(nn.init, "_no_grad_trunc_normal_", None)
    before = torch.are_deterministic_algorithms_enabled()
    lenient = torch.is_deterministic_algorithms_warn_only_enabled()

    def listed(tensor: Tensor, mean: float, std: float, a: float, b: float, *rest: Any, **kw: Any):  # type: ignore[no-untyped-def]
        assert draw is not None
        bound = min(abs(a - mean), abs(b - mean))
        if std > 0 and bound > CUT * std:
            cut.append((_caller(), float(std), float(bound)))
        return draw(tensor, mean, std, a, b, *rest, **kw)

    torch.use_deterministic_algorithms(True, warn_only=True)
    if draw is not None:
        nn.init._no_grad_trunc_normal_ = listed
    try:
        yield cut
    finally:
        torch.use_deterministic_algorithms(before, warn_only=lenient)
        if draw is not None:
            nn.init._no_grad_trunc_normal_ = draw


def _caller() -> str:
    """File and line of the innermost caller outside of torch."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "/torch/" in frame.f_code.co_filename.replace("\\", "/"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.replace(chr(92), '/').rpartition('/')[2]}:{frame.f_lineno}"


def _uncut(cut: list[tuple[str, float, float]]) -> Iterator[Finding]:
    for place in dict.fromkeys(where for where, *_ in cut):
        std, bound = next(row[1:] for row in cut if row[0] == place)
        why = f"trunc_normal_ with std {std:.3g} cuts at {bound:.3g}, {bound / std:.3g} standard "
        why += "deviations out: bounds are absolute, not in deviations, and cut nothing"
        mend = f"pass a={-2 * std:.3g}, b={2 * std:.3g} to cut at two deviations"
        yield Finding("warning", "nothing truncated", (place,), (), bound / std, 2.0, why, mend)


def unwritten(module: nn.Module) -> Iterator[Finding]:
    """Findings on tensors without storage, or with entries that no initialisation draws."""
    buffers = {n: b for n, b in module.named_buffers() if b.is_floating_point()}
    tensors = {n: p for n, p in module.named_parameters() if p.is_floating_point()}
    meta = [name for name, tensor in {**tensors, **buffers}.items() if tensor.is_meta]
    again = "initialise it: reset_parameters of every submodule after to_empty, buffers too"
    if meta:
        why = "it is still on the meta device and has no entries"
        mend = "module.to_empty(device=...), then initialise every tensor, or load a checkpoint"
        yield Finding("error", "no storage", gathered_names(meta), reason=why, mend=mend)
    present = {n: t.detach() for n, t in tensors.items() if not t.is_meta and t.numel()}
    bad = [n for n, t in present.items() if not bool(torch.isfinite(t).all())]
    # A buffer may be a mask, with entries of -inf or the most negative number.
    bad += [n for n, t in buffers.items() if not t.is_meta and bool(torch.isnan(t).any())]
    if bad:
        why = "entries are not finite (nan or inf), so that nothing can be run: a std of nan, or "
        why += "memory that was taken (torch.empty, to_empty) and never written"
        yield Finding("error", "entries not finite", gathered_names(bad), reason=why, mend=again)
    shares = {n: _stale(t) for n, t in present.items() if n not in bad}
    if odd := [n for n, share in shares.items() if share > ODD]:
        worst = max(shares[n] for n in odd)
        why = f"entries below {SMALL:g} or above {LARGE:g} in size, which no initialisation draws: "
        why += "memory that was taken (torch.empty, to_empty) and never written"
        yield Finding("error", "never written", gathered_names(odd), (), worst, 0.0, why, again)


def _stale(tensor: Tensor) -> float:
    """The share of implausible entries."""
    size = tensor.float().abs()
    odd = ((size > 0) & (size < SMALL)) | (size > LARGE)
    return float(odd.double().mean())
