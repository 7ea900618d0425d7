"""Modules from files: a checkpoint beside its config.json."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moments.errors import DomainError, ValidityWarning, domain_error
from moments.families import FAMILIES
from moments.huggingface import read_config
from moments.optional import optional

with optional("torch", "torch"):
    import torch
    from torch import nn


def load(path: str | os.PathLike[str]) -> nn.Module:
    """The module of a checkpoint on this machine; nothing is fetched.

    Args:
        path: a folder with config.json and model.safetensors (or its shards and their index), or
            one .safetensors file with config.json beside it.

    Raises:
        DomainError: no such file, or a config of no known family.
        MomentsError: torch or transformers is not installed.

    Warns:
        ValidityWarning: parameters that the checkpoint lacks.
    """
    with optional("hf", "transformers", "safetensors"):
        import transformers
        from safetensors.torch import load_file
    given = Path(path)
    folder = given if given.is_dir() else given.parent
    if not given.exists():
        raise domain_error("path", str(path), "a checkpoint's folder or .safetensors file")
    entries = read_config(folder)
    kind = entries.pop("model_type", None)
    if kind not in FAMILIES:
        raise domain_error("model_type", kind, f"one of {', '.join(sorted(FAMILIES))}")
    config = transformers.AutoConfig.for_model(kind, **entries)
    names = [*(entries.get("architectures") or ()), FAMILIES[kind].module]
    build: Any = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    if given.is_dir():
        source: dict[str, Any] = {"pretrained_model_name_or_path": folder}
    elif given.suffix == ".safetensors":
        source = {"pretrained_model_name_or_path": None, "state_dict": _state(given, load_file)}
    else:
        raise domain_error("path", str(path), "a folder or a .safetensors file")
    with torch.random.fork_rng(devices=[]), _quiet(transformers.utils.logging):
        torch.manual_seed(0)
        module, info = build.from_pretrained(
            **source, config=config, local_files_only=True, output_loading_info=True
        )
    if missing := sorted(info["missing_keys"]):
        warnings.warn(
            f"{len(missing)} parameters are not in the checkpoint and were drawn afresh: "
            f"{', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}",
            ValidityWarning,
            stacklevel=3,
        )
    found: nn.Module = module
    return found


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Without transformers' progress bar."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _state(path: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    try:
        return read(path)
    except Exception as error:
        raise DomainError(f"{path} is no readable safetensors file: {error}") from None
