"""A module without storage, given one, its entries drawn as its own parts say."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from ..errors import optional

with optional("torch", "torch"):
    import torch
    from torch import Tensor, nn

_RESETS = ("reset_parameters", "_reset_parameters")
_ROOTS = ("_init_weights", "init_weights", "initialize_weights")
UNKNOWN = 0.02
"""Deviation of entries of which nothing says how they are drawn."""


def is_meta(module: nn.Module) -> bool:
    """Whether any parameter has no storage."""
    return any(parameter.is_meta for parameter in module.parameters())


def drawn(module: nn.Module, seed: int = 0) -> tuple[nn.Module, tuple[str, ...]]:
    """A copy on the CPU whose entries are drawn, and what nothing in the module says, in words.

    Every part's own `reset_parameters` draws it, then the module's own rule for all parts
    (`_init_weights` as transformers has it, or `init_weights()`). What a constructor draws beside
    these is not seen, nor is a buffer that it fills.
    """
    filled = copy.deepcopy(module)
    lost = [name for name, buffer in filled.named_buffers() if buffer.is_meta]
    tied = _tied(module)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        filled.to_empty(device="cpu")
        _tie(filled, tied)
        buffers = {name: _assumed(filled.get_buffer(name)) for name in lost}
        doubts = list(_drawn(filled))
    for name, buffer in buffers.items():
        if torch.equal(filled.get_buffer(name), buffer):
            what = "a lower triangle" if _square(buffer) else "ones"
            doubts.append(f"buffer {name}: nothing says what it holds, taken as {what}")
    return filled, tuple(doubts)


def _assumed(buffer: Tensor) -> Tensor:
    """A buffer filled with what it may be: a causal mask, or ones; a copy of it."""
    ones = torch.ones_like(buffer)
    buffer.copy_(ones.tril() if _square(buffer) else ones)
    return buffer.clone()


def _square(buffer: Tensor) -> bool:
    return buffer.ndim > 1 and bool(buffer.shape[-1] == buffer.shape[-2])


def _drawn(module: nn.Module) -> Iterator[str]:
    known: set[nn.Parameter] = set()
    for part in module.modules():
        reset = next((getattr(part, n) for n in _RESETS if callable(getattr(part, n, None))), None)
        if reset is not None:
            reset()
            known.update(part.parameters())
    rest = [(name, p) for name, p in module.named_parameters() if p not in known]
    for name, parameter in rest:
        if parameter.ndim > 1:
            parameter.normal_(std=UNKNOWN)
        else:
            parameter.fill_(float(not name.endswith("bias")))
    rule = next((getattr(module, n) for n in _ROOTS if callable(getattr(module, n, None))), None)
    if rule is None:
        yield "entries are as reset_parameters draws them: a constructor may draw others"
        for name, parameter in rest:
            what = f"normal, of deviation {UNKNOWN}" if parameter.ndim > 1 else "a norm's"
            yield f"{name}: nothing says how it is drawn, taken as {what}"
    elif rule.__name__ == "_init_weights":
        module.apply(rule)
    else:
        rule()


def _tied(module: nn.Module) -> list[list[str]]:
    """Names of one and the same parameter."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [alike for alike in names.values() if len(alike) > 1]


def _tie(module: nn.Module, tied: list[list[str]]) -> None:
    """`to_empty` gives every name a storage of its own."""
    for first, *others in tied:
        parameter = module.get_parameter(first)
        for name in others:
            path, _, last = name.rpartition(".")
            setattr(module.get_submodule(path), last, parameter)
