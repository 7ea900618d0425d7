"""Prediction of a config that no Transformer describes, by the operations of a narrow module.

The module has the config's depth, and every width divided by one number. The variance of a matrix
is multiplied by the ratio of the features that it sums over (`Lowering.wider`): to leading order in
1/width the signal is that of the config's module, and gradients are so up to one common factor.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from ..errors import DomainError, MomentsError, Undeclared, optional, refused
from ..show.findings import Report
from .from_config import (
    VOCABULARY,
    built_narrow,
    cut_tokens,
    module_class,
    named_parameters,
    quietly,
    rescale,
    settings,
    squares_drawn,
)
from .open_check import NotRead, report_of
from .operations.predict import ModulePrediction, lowered, summary

with optional("hf", "torch", "transformers"):
    import torch
    from torch import nn
    from transformers import PretrainedConfig

WIDTH = 256
"""Largest d_model of a narrow module."""

AGREED = 0.25
"""Relative difference of a variance at two widths from which it is noted: a root of the width in
the code changes it by 0.41 or more."""

DRAWS, FEW = 24, 8
"""Random draws of operations without a law, in the module and in the one of half its width."""

_WIDTHS = re.compile(
    r".*(hidden_sizes?|d_model|n_embd|n_embed|d_embed|embed_dim\w*|embedding_size|d_ff|n_inner|width"
    r"|intermediate\w*|ffn\w*|feed_?forward\w*|inner_dim\w*|mlp\w*dim\w*|hidden_dim|lora_rank"
    r"|dt_rank|time_step_rank|d_ssm|(?<!head_)(?<!rotary_)(?<!head)dim|projection_dim)"
)
_HEADS = re.compile(r".*(heads|n_head|num_kv|query_groups\w*|n_groups|num_heads\w*)")


@dataclasses.dataclass(frozen=True)
class Narrow:
    """A narrow module of a config.

    Attributes:
        module: of the config's depth.
        wider: parameter -> by axis, the ratio of the config's size to the module's.
        width, true: d_model of the module and of the config.
    """

    module: nn.Module
    wider: dict[str, tuple[float, ...]]
    width: int
    true: int

    def followed(self, draws: int = DRAWS) -> ModulePrediction:
        """The prediction by operations for the config's module.

        Raises:
            MomentsError: it cannot be run.
        """
        return summary(lowered(self.module, None, draws=draws, wider=self.wider), draws)


def predicted(entries: Mapping[str, Any]) -> ModulePrediction:
    """The prediction of a config by the operations of its module.

    Raises:
        DomainError: transformers builds no module of it, or none that is narrow.
        MomentsError: the module cannot be run on random input.
    """
    near, far = _pair(entries)
    result = near.followed()
    return dataclasses.replace(result, notes=(*_notes(near, far, result), *result.notes))


def checked(entries: Mapping[str, Any], refusal: Undeclared) -> Report:
    """`moments.check` of a config by the operations of its module.

    Raises:
        DomainError: the refusal, and why its operations could not be followed either.
    """
    try:
        near, far = _pair(entries)
        with quietly():
            report = report_of(near.module, None, NotRead(str(refusal)), near.wider)
    except MomentsError as error:
        said = str(error).splitlines()[0]
        raise DomainError(f"{refusal}; nor are its operations followed: {said}") from error
    place = "" if far is None else f", in a module of width {near.width} for one of {near.true}"
    notes = (*_notes(near, far, None), *report.notes)
    return dataclasses.replace(report, notes=notes, read=report.read + place)


def _pair(entries: Mapping[str, Any]) -> tuple[Narrow, Narrow | None]:
    """A narrow module, and one of half its width unless it has the config's own width."""
    return _built(json.dumps(dict(entries), sort_keys=True))


@functools.lru_cache(maxsize=4)
def _built(text: str) -> tuple[Narrow, Narrow | None]:
    entries = json.loads(text)
    with quietly():
        config, _ = settings(entries)
        build = module_class(entries, config, pairs=True)
        what = f"config of type {entries['model_type']!r}"
        with refused(what), torch.device("meta"):
            whole = build(config)
        shapes = {name: tuple(p.shape) for name, p in named_parameters(whole)}
        true, factor = _width(config), 1
        while true // factor > WIDTH:
            factor *= 2
        near = _narrowed(build, config, factor, shapes)
        far = None if factor == 1 else _narrowed(build, config, 2 * factor, shapes)
        try:
            squares = squares_drawn(whole)
        except DomainError:  # a rule that needs whole tensors
            squares = {} if far is None else _extrapolated(near.module, far.module, factor)
        for narrow in (near, far):
            if narrow is not None:
                rescale(narrow.module, squares)
                _equalise_rows(narrow.module)
    return near, far


def _equalise_rows(module: nn.Module) -> None:
    """Scale all rows of a table to one mean square, which wide rows have without it."""
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.Embedding):
                squares = part.weight.square().mean(1, keepdim=True)
                drawn = squares > 0
                mean = squares[drawn].mean()
                part.weight.mul_(torch.where(drawn, (mean / squares).sqrt(), 0.0))


def _extrapolated(near: nn.Module, far: nn.Module, factor: int) -> dict[str, float]:
    """Mean squares at the config's width, by the half-integer powers of the width that two narrow
    modules follow."""
    result = {}
    others = dict(named_parameters(far))
    for name, parameter in named_parameters(near):
        x, y = (float(p.detach().double().square().mean()) for p in (parameter, others[name]))
        if x > 0 and y > 0:
            result[name] = x * factor ** (round(2 * math.log2(x / y)) / 2)
    return result


def _width(config: Any) -> int:
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    for part in (inner, config):
        for name in ("hidden_size", "d_model", "n_embd", "embed_dim", "dim"):
            value = getattr(part, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return 1


def _narrowed(
    build: Any, config: Any, factor: int, shapes: Mapping[str, tuple[int, ...]]
) -> Narrow:
    narrow = _divided(config, factor)
    what, module = built_narrow(build, narrow)
    wider = {}
    for name, parameter in named_parameters(module):
        if len(shapes.get(name, ())) != parameter.ndim:
            raise DomainError(f"{what} has another {name} than the true one")
        pairs = zip(shapes[name], parameter.shape, strict=True)
        wider[name] = tuple(big / small for big, small in pairs)
    return Narrow(module, wider, _width(narrow), _width(config))


def _divided(config: Any, factor: int) -> Any:
    """A config, and the configs in it, with every width and number of heads divided by `factor`."""
    narrow = copy.deepcopy(config)
    narrow.use_cache = False
    for name, value in list(vars(narrow).items()):
        if isinstance(value, PretrainedConfig):
            setattr(narrow, name, _divided(value, factor))
        elif _HEADS.fullmatch(name) or _WIDTHS.fullmatch(name):
            if isinstance(value, list) and all(type(v) is int for v in value):
                setattr(narrow, name, [max(1, v // factor) for v in value])
            elif type(value) is int:
                setattr(narrow, name, max(1, value // factor))
        elif name == "vocab_size" and type(value) is int:
            setattr(narrow, name, min(VOCABULARY, value))
    return cut_tokens(narrow)


def _notes(near: Narrow, far: Narrow | None, result: ModulePrediction | None) -> list[str]:
    """Notes on the narrow module, and on variances that differ at a second width."""
    notes = [
        "followed operation by operation on 16 tokens at most, since moments.Transformer cannot "
        "declare what the module of this config does"
    ]
    if far is None:
        return notes
    notes.append(
        f"a module of width {near.width} with the config's depth stands for width {near.true}, its "
        "matrices for as many features as those have: gradients are up to one factor for all"
    )
    try:
        other, result = far.followed(FEW), result or near.followed(FEW)
    except MomentsError:
        return notes
    ratios = [
        (row.module, half.variance / row.variance)
        for row, half in zip(result.outputs, other.outputs, strict=False)
        if row.module == half.module and row.variance > 0
    ]
    if different := [(name, ratio) for name, ratio in ratios if abs(ratio - 1) > AGREED]:
        name, ratio = different[0]
        more = f" and {len(different) - 1} more" if different[1:] else ""
        notes.append(
            f"{name}{more}: the variance follows the width, {ratio:.3g} times at half of it; that "
            "of the config's width is not known"
        )
    return notes
