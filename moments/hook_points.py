"""Where the sites of the theory sit inside real modules, and what their weight matrices are.

A family is a table of paths relative to one layer. Families are told apart by their submodules, not
by class, so that subclasses and relatives (RoBERTa for BERT) are found too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from moments.draws import STREAM, WeightGradient
from moments.errors import MomentsError

if TYPE_CHECKING:
    from torch import Tensor, nn

Side = Literal["input", "output"]


class HookPoint(NamedTuple):
    """One site: the first tensor going into, or coming out of, the submodule at `path`."""

    layer: int
    site: str
    path: str
    side: Side


class WeightPart(NamedTuple):
    """One weight matrix: `part` of `parts` equal blocks of a parameter along axis `axis`."""

    weight: str
    parameter: str
    axis: int = 0
    part: int = 0
    parts: int = 1

    def of(self, gradient: Tensor) -> Tensor:
        """The block of a gradient shaped like the parameter."""
        return gradient.chunk(self.parts, dim=self.axis)[self.part]


@dataclass(frozen=True)
class Family:
    """Sites and weights of one kind of layer, by paths relative to it."""

    sites: tuple[tuple[str, str, Side], ...]
    weights: tuple[WeightPart, ...]

    def recognises(self, layer: nn.Module) -> bool:
        """Whether the layer has every submodule and parameter that this family names."""
        modules = {name for name, _ in layer.named_modules()}
        parameters = {name for name, _ in layer.named_parameters()}
        return all(path in modules for _, path, _ in self.sites) and all(
            part.parameter in parameters for part in self.weights
        )


def _thirds(parameter: str, axis: int) -> tuple[WeightPart, ...]:
    return tuple(
        WeightPart(name, parameter, axis, part, 3)
        for part, name in enumerate(("query", "key", "value"))
    )


BERT = Family(
    sites=(
        ("attention.heads", "attention.self", "output"),
        ("attention.projection", "attention.output.dense", "output"),
        ("attention.dropout", "attention.output.dropout", "output"),
        ("attention.sum", "attention.output.LayerNorm", "input"),
        ("attention.norm", "attention.output.LayerNorm", "output"),
        ("ffn.in", "intermediate.dense", "output"),
        ("ffn.activation", "intermediate", "output"),
        ("ffn.out", "output.dense", "output"),
        ("ffn.dropout", "output.dropout", "output"),
        ("ffn.sum", "output.LayerNorm", "input"),
        ("ffn.norm", "output.LayerNorm", "output"),
        (STREAM, "", "output"),
    ),
    weights=(
        WeightPart("query", "attention.self.query.weight"),
        WeightPart("key", "attention.self.key.weight"),
        WeightPart("value", "attention.self.value.weight"),
        WeightPart("output", "attention.output.dense.weight"),
        WeightPart("ffn_in", "intermediate.dense.weight"),
        WeightPart("ffn_out", "output.dense.weight"),
    ),
)
GPT2 = Family(
    sites=(
        ("attention.norm", "ln_1", "output"),
        ("attention.heads", "attn.c_proj", "input"),
        ("attention.projection", "attn.c_proj", "output"),
        ("attention.dropout", "attn.resid_dropout", "output"),
        ("attention.sum", "ln_2", "input"),
        ("ffn.norm", "ln_2", "output"),
        ("ffn.in", "mlp.c_fc", "output"),
        ("ffn.activation", "mlp.c_proj", "input"),
        ("ffn.out", "mlp.c_proj", "output"),
        ("ffn.dropout", "mlp.dropout", "output"),
        ("ffn.sum", "", "output"),
        (STREAM, "", "output"),
    ),
    # c_attn is one (d, 3 d) matrix applied from the right: query, key, value side by side.
    weights=(
        *_thirds("attn.c_attn.weight", axis=1),
        WeightPart("output", "attn.c_proj.weight"),
        WeightPart("ffn_in", "mlp.c_fc.weight"),
        WeightPart("ffn_out", "mlp.c_proj.weight"),
    ),
)

# nn.TransformerEncoderLayer applies its head projection inside a function, so "attention.heads" has
# no hook; its activation is followed by a dropout of its own, before which the site sits.
_ENCODER_INNER: tuple[tuple[str, str, Side], ...] = (
    ("attention.projection", "self_attn", "output"),
    ("attention.dropout", "dropout1", "output"),
)
_ENCODER_FFN: tuple[tuple[str, str, Side], ...] = (
    ("ffn.in", "linear1", "output"),
    ("ffn.activation", "dropout", "input"),
    ("ffn.out", "linear2", "output"),
    ("ffn.dropout", "dropout2", "output"),
)
_ENCODER_WEIGHTS = (
    *_thirds("self_attn.in_proj_weight", axis=0),
    WeightPart("output", "self_attn.out_proj.weight"),
    WeightPart("ffn_in", "linear1.weight"),
    WeightPart("ffn_out", "linear2.weight"),
)
ENCODER_POST = Family(
    sites=(
        *_ENCODER_INNER,
        ("attention.sum", "norm1", "input"),
        ("attention.norm", "norm1", "output"),
        *_ENCODER_FFN,
        ("ffn.sum", "norm2", "input"),
        ("ffn.norm", "norm2", "output"),
        (STREAM, "", "output"),
    ),
    weights=_ENCODER_WEIGHTS,
)
ENCODER_PRE = Family(
    sites=(
        ("attention.norm", "norm1", "output"),
        *_ENCODER_INNER,
        ("attention.sum", "norm2", "input"),
        ("ffn.norm", "norm2", "output"),
        *_ENCODER_FFN,
        ("ffn.sum", "", "output"),
        (STREAM, "", "output"),
    ),
    weights=_ENCODER_WEIGHTS,
)

# Submodules that only an embedding has -> its sites.
_EMBEDDINGS: tuple[tuple[tuple[str, ...], tuple[tuple[str, str, Side], ...]], ...] = (
    (
        ("word_embeddings", "LayerNorm", "dropout"),
        (
            ("embedding.sum", "LayerNorm", "input"),
            ("embedding.norm", "LayerNorm", "output"),
            ("embedding", "dropout", "output"),
        ),
    ),
    (("wte", "drop"), (("embedding.sum", "drop", "input"), ("embedding", "drop", "output"))),
)
_TABLES = {
    "word_embeddings": "token",
    "wte": "token",
    "position_embeddings": "position",
    "wpe": "position",
    "token_type_embeddings": "segment",
}


def family_of(layer: nn.Module) -> Family | None:
    """The family a layer belongs to, None where no family knows it."""
    if isinstance(getattr(layer, "norm_first", None), bool):
        encoder = ENCODER_PRE if layer.norm_first else ENCODER_POST
        return encoder if encoder.recognises(layer) else None
    return next((family for family in (BERT, GPT2) if family.recognises(layer)), None)


def layers_of(module: nn.Module) -> list[tuple[str, Family]]:
    """Paths of the module's layers, in order, each with its family.

    Raises:
        MomentsError: no layer is known, or they sit in more than one stack.
    """
    found = [
        (path, family)
        for path, part in module.named_modules()
        if (family := family_of(part)) is not None
    ]
    if not found:
        raise MomentsError(
            f"no known layer in {type(module).__name__}: moments finds the layers of Hugging Face "
            "BERT and GPT-2 and of nn.TransformerEncoder; for another module pass "
            "sites=[(layer, site, submodule_path, 'input' or 'output'), ...]"
        )
    stacks = sorted({path.rpartition(".")[0] for path, _ in found})
    if len(stacks) > 1:
        raise MomentsError(
            f"{type(module).__name__} has several stacks of layers ({', '.join(stacks)}): "
            "measure one of them, or pass sites=[...]"
        )
    return found


def hook_points(module: nn.Module) -> tuple[HookPoint, ...]:
    """Every known site of a Hugging Face BERT or GPT-2, or of an nn.TransformerEncoder.

    The result is also a template: edit a copy of it for a relative of these, and pass it as
    `sites` to `moments.torch.measure`. A mapping of your own needs at least the site "stream" at
    the input of layer 1, as layer 0, and at the output of every layer.

    Raises:
        MomentsError: no layer is known, or they sit in more than one stack.
    """
    layers = layers_of(module)
    points = [
        HookPoint(0, site, _joined(path, inner), side)
        for path, part in module.named_modules()
        for needed, sites in _EMBEDDINGS
        if all(hasattr(part, name) for name in needed)
        for site, inner, side in sites
    ]
    points.append(HookPoint(0, STREAM, layers[0][0], "input"))
    for number, (path, family) in enumerate(layers, start=1):
        points.extend(HookPoint(number, s, _joined(path, p), side) for s, p, side in family.sites)
    return tuple(points)


def weight_parts(
    module: nn.Module, sites: Iterable[HookPoint] | None = None
) -> list[tuple[WeightGradient, WeightPart]]:
    """Every two-dimensional parameter that can learn, split into the matrices it holds.

    A parameter that no family names keeps its own name as its role, in layer 0; so do all where
    the user gave the `sites`.
    """
    known: dict[str, list[tuple[int, WeightPart]]] = {}
    for number, (path, family) in enumerate(layers_of(module) if sites is None else (), start=1):
        for part in family.weights:
            name = _joined(path, part.parameter)
            known.setdefault(name, []).append((number, part))
    rows = []
    for name, parameter in module.named_parameters():
        if parameter.ndim != 2 or not parameter.requires_grad:
            continue
        table = _TABLES.get(name.removesuffix(".weight").rpartition(".")[2], name)
        for number, part in known.get(name, [(0, WeightPart(table, name))]):
            rows.append((WeightGradient(number, part.weight, name), part._replace(parameter=name)))
    return rows


def _joined(path: str, inner: str) -> str:
    return ".".join(part for part in (path, inner) if part)
