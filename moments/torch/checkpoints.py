"""Modules from files: a checkpoint beside its config.json."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import DomainError, ValidityWarning, brief, domain_error, optional
from ..files import read_object
from ..model.huggingface.config import read_config

with optional("torch", "torch"):
    import torch
    from torch import nn


def load(path: str | os.PathLike[str]) -> nn.Module:
    """The module of a checkpoint on this machine; nothing is fetched.

    Args:
        path: a folder with config.json and model.safetensors (or its shards and their index), or
            one .safetensors file with config.json beside it.

    Raises:
        DomainError: no such file, one that is no safetensors file, or a config of no known family.
        MomentsError: torch or transformers is not installed.

    Warns:
        ValidityWarning: parameters that the checkpoint lacks.
    """
    with optional("hf", "transformers", "safetensors"):
        import transformers

        from .huggingface_modules import refused, settings_of
    if not os.path.exists(path):
        raise domain_error("path", str(path), "a checkpoint's folder or .safetensors file")
    given = Path(path)
    folder = given if given.is_dir() else given.parent
    entries = read_config(folder)
    found, config = settings_of(entries)
    if not given.is_dir() and given.suffix != ".safetensors":
        raise domain_error("path", str(path), "a folder or a .safetensors file")
    tensors = _tensors(given)
    with (
        torch.random.fork_rng(devices=[]),
        _quiet(transformers.utils.logging),
        refused(f"checkpoint {brief(str(path))}"),
    ):
        torch.manual_seed(0)
        module, info = _class(entries, found.module, config).from_pretrained(
            None, state_dict=tensors, config=config, local_files_only=True, output_loading_info=True
        )
    if missing := sorted(info["missing_keys"]):
        warnings.warn(
            f"{len(missing)} parameters are not in the checkpoint and were drawn afresh: "
            f"{', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}",
            ValidityWarning,
            stacklevel=3,
        )
    built: nn.Module = module
    return built


def _class(entries: dict[str, Any], usual: str, config: Any) -> Any:
    """The model class of transformers that a config names, if it is one of its own family's."""
    import transformers

    names = entries.get("architectures")
    for name in names if isinstance(names, list) else ():
        kind: Any = getattr(transformers, name, None) if isinstance(name, str) else None
        model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
        if model and kind.config_class is type(config):
            return kind
    return getattr(transformers, usual)


def _tensors(path: Path) -> dict[str, Any]:
    """The tensors of one safetensors file, or of a folder's, by name; no other format is read."""
    from safetensors.torch import load_file

    files = [path]
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        files = [path / "model.safetensors"]
        if not files[0].exists() and index.exists():
            files = [path / name for name in _shards(index)]
        elif not files[0].exists():
            raise domain_error("path", str(path), "a folder with model.safetensors or its index")
    found: dict[str, Any] = {}
    for file in files:
        try:
            found |= load_file(file)
        except Exception as error:
            raise DomainError(f"{file} is no readable safetensors file: {error}") from None
    return found


def _shards(index: Path) -> list[str]:
    """Names of the files that an index lists, all of them in its folder."""
    listed = read_object(index, "index").get("weight_map")
    names = set(listed.values()) if isinstance(listed, dict) else set()
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise domain_error("weight_map", name, "the name of a file beside the index")
    if not names:
        raise domain_error("weight_map", listed, "a JSON object of file names")
    return sorted(names)


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
