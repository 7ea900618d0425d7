"""Modules of checkpoints next to their config.json, and modules on the meta device."""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DomainError, ValidityWarning, brief, domain_error, optional, refused
from ..files import read_object
from ..model.huggingface.config import read_config
from .running import aliases, own_module


def load(path: str | os.PathLike[str]) -> nn.Module:
    """The module of a local checkpoint; nothing is downloaded.

    Args:
        path: a folder with config.json and model.safetensors (or its shards and their index), or
            one .safetensors file with config.json next to it.

    Raises:
        DomainError: no such file, one that is no safetensors file, or a config of no known family.
        MomentsError: torch or transformers is not installed.

    Warns:
        ValidityWarning: parameters that the checkpoint lacks.
    """
    with optional("hf", "transformers", "safetensors"):
        import transformers

        from .huggingface_modules import named_class, settings_of
    if not os.path.exists(path):
        raise domain_error("path", str(path), "a checkpoint's folder or .safetensors file")
    file = Path(path)
    entries = read_config(file if file.is_dir() else file.parent)
    result, config = settings_of(entries)
    if not file.is_dir() and file.suffix != ".safetensors":
        raise domain_error("path", str(path), "a folder or a .safetensors file")
    tensors, names = _tensors(file), entries.get("architectures")
    named = named_class(config, *(names if isinstance(names, list) else ()))
    with (
        torch.random.fork_rng(devices=[]),
        _quiet(transformers.utils.logging),
        refused(f"checkpoint {brief(str(path))}"),
    ):
        torch.manual_seed(0)
        module, info = (named or getattr(transformers, result.module)).from_pretrained(
            None, state_dict=tensors, config=config, local_files_only=True, output_loading_info=True
        )
    if missing := sorted(info["missing_keys"]):
        warnings.warn(
            f"{len(missing)} parameters are not in the checkpoint and were drawn afresh: "
            f"{', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}",
            ValidityWarning,
            stacklevel=3,
        )
    loaded: nn.Module = module
    return loaded


def opened(module: nn.Module | str | os.PathLike[str]) -> nn.Module:
    """A module, `unwrapped`, or the module of a checkpoint's path."""
    loaded = load(module) if isinstance(module, str | os.PathLike) else module
    return own_module(loaded, "an nn.Module or a checkpoint's path")


def _tensors(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file, or of all in a folder, by name."""
    from safetensors.torch import load_file

    files = [path]
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        files = [path / "model.safetensors"]
        if not files[0].exists() and index.exists():
            files = [path / name for name in _shards(index)]
        elif not files[0].exists():
            raise domain_error("path", str(path), "a folder with model.safetensors or its index")
    result: dict[str, Any] = {}
    for file in files:
        try:
            result |= load_file(file)
        except Exception as error:
            raise DomainError(f"{file} is no readable safetensors file: {error}") from None
    return result


def _shards(index: Path) -> list[str]:
    """The names of the files in an index's list, which must be in its folder."""
    listed = read_object(index, "index").get("weight_map")
    names = set(listed.values()) if isinstance(listed, dict) else set()
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise domain_error("weight_map", name, "the name of a file in the folder of the index")
    if not names:
        raise domain_error("weight_map", listed, "a JSON object of file names")
    return sorted(names)


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Hide transformers' progress bar within the context."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


# --- modules on the meta device -------------------------------------------------------------------


_RESETS = ("reset_parameters", "_reset_parameters")
_ROOTS = ("_init_weights", "init_weights", "initialize_weights")
UNKNOWN = 0.02
"""Standard deviation assumed for entries without an initialisation."""


def is_meta(module: nn.Module) -> bool:
    """Whether any parameter has no storage."""
    return any(parameter.is_meta for parameter in module.parameters())


def drawn(module: nn.Module, seed: int = 0) -> tuple[nn.Module, tuple[str, ...]]:
    """An initialised copy of a module on the CPU, and what had to be assumed, in words.

    Every part is drawn by its own `reset_parameters`, then by the module's own rule for all parts
    (`_init_weights`, as in transformers, or `init_weights()`). Entries that a constructor draws
    otherwise, and buffers that it fills, are unknown.
    """
    filled = copy.deepcopy(module)
    lost = [name for name, buffer in filled.named_buffers() if buffer.is_meta]
    tied = [names for names in aliases(module).values() if len(names) > 1]
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
    """Fill a buffer with a causal mask, if it is square, or ones; return a copy."""
    ones = torch.ones_like(buffer)
    buffer.copy_(ones.tril() if _square(buffer) else ones)
    return buffer.clone()


def _square(buffer: Tensor) -> bool:
    return buffer.ndim > 1 and bool(buffer.shape[-1] == buffer.shape[-2])


def _drawn(module: nn.Module) -> Iterator[str]:
    """Draw the entries of a module; yield what had to be assumed."""
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


def _tie(module: nn.Module, tied: list[list[str]]) -> None:
    """Tie parameters again, because `to_empty` gives every name its own storage."""
    for first, *others in tied:
        for name in others:
            _set(module, name, module.get_parameter(first))


def _set(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, last = name.rpartition(".")
    setattr(module.get_submodule(path), last, parameter)


# --- what a library's class draws, beside what a module has ---------------------------------------


def redrawn(module: nn.Module, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Parameters as transformers' own classes draw them, by name; nothing for other modules.

    Every part of a copy is drawn by the rule of the innermost model around it, children before
    parents, as `PreTrainedModel.initialize_weights` does. Parameters that no class draws are left
    out.
    """
    if not _is_transformers(module):
        return
    names = [name for name, _ in module.named_parameters()]  # a tied tensor once
    copied = copy.deepcopy(module)
    for _, *others in aliases(copied).values():
        for name in others:  # nothing is tied before everything is drawn
            _set(copied, name, nn.Parameter(copied.get_parameter(name).clone()))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for parameter in copied.parameters():
            parameter._is_hf_initialized = False
            if parameter.is_floating_point():
                parameter.fill_(math.nan)
        _draw(copied, copied)
    for name in names:
        parameter = copied.get_parameter(name)
        if bool(torch.isfinite(parameter).all()):
            yield name, parameter


def _is_transformers(module: nn.Module) -> bool:
    known = hasattr(module, "_init_weights") and hasattr(module, "config")
    return known and type(module).__module__.startswith("transformers.")


def _draw(part: nn.Module, model: Any) -> None:
    """A part by the rule of the model around it, or by its own."""
    model = part if _is_transformers(part) else model
    for child in part.children():
        _draw(child, model)
    model._init_weights(part)
