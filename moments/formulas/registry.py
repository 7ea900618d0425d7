"""All components by name, and the pages of the formula reference, generated from their laws."""

from __future__ import annotations

from typing import Any

from ..errors import DomainError, unknown_name
from . import (
    attention,
    block,
    embedding,
    gated,
    head,
    linear,
    normalization,
    softmax,
)
from .activation import (
    ACTIVATION_LAWS,
    activation_laws,
    activation_names,
    leaky_slope,
    register_activation,
    registered_function,
)
from .law import QUANTITIES, THEORIES, ComponentLaws, Law
from .symbols import SYMBOLS

_ALL = (
    embedding.TOKEN_EMBEDDING,
    embedding.SEGMENT_EMBEDDING,
    embedding.POSITION_EMBEDDING,
    linear.LINEAR,
    linear.BIASED_LINEAR,
    linear.DROPOUT,
    linear.SCALE,
    linear.CORRELATED_RESIDUAL,
    *ACTIVATION_LAWS.values(),
    *gated.GATED,
    normalization.LAYERNORM,
    normalization.RMSNORM,
    normalization.DYT,
    softmax.SOFTMAX,
    attention.ATTENTION_WITHOUT_VALUE,
    attention.ATTENTION,
    block.ATTENTION_BLOCK,
    block.FFN_BLOCK,
    head.CROSS_ENTROPY,
    attention.UNIFORM_ATTENTION_GRADIENTS,
)

COMPONENTS: dict[str, ComponentLaws] = {record.name: record for record in _ALL}

_POSITIONS = "docs/theory/attention.md, Rotary positions"
_PENALTIES = "docs/theory/positions.md, Distance penalties"
_BIASES = "docs/theory/positions.md, Relative biases"
_LOGITS = "docs/theory/logits.md"
_STEP = "docs/theory/first-step.md"

# Search words for which there is no single component, and where they are documented.
ELSEWHERE = {
    "rotary": _POSITIONS,
    "rope": _POSITIONS,
    "alibi": _PENALTIES,
    "relative_bias": _BIASES,
    "t5": _BIASES,
    "sinusoidal": "docs/theory/positions.md, Sinusoidal positions",
    "window": "docs/theory/positions.md, Windows",
    "causal": "docs/theory/state.md, Classes of positions",
    "padding": "docs/theory/positions.md, Several sequences",
    "packing": "docs/theory/positions.md, Several sequences",
    "qk_norm": _LOGITS,
    "logit_softcap": _LOGITS,
    "row_statistics": "docs/theory/softmax.md, What is needed",
    "sink": "docs/theory/latent_attention.md, A sink",
    "residual": "correlated_residual; docs/theory/gradients.md, Lost directions",
    "b2t": "docs/theory/gradients.md, A second connection",
    "dslm": "its scales in moments/scheme/dslm.py",
    "lns": "its scales in moments/model/transformer.py",
    "band": "docs/theory/band.md, One draw",
    "tied": "docs/theory/loss.md, Tied rows",
    "sgd": _STEP,
    "adam": _STEP,
    "muon": _STEP,
}


def component(name: str) -> ComponentLaws:
    """The laws of one component.

    >>> component("relu").law("variance")(x_variance=1.0).round(4)
    np.float64(0.3408)

    Raises:
        DomainError: no component of that name.
    """
    if name in COMPONENTS:
        return COMPONENTS[name]
    if name in activation_names() or leaky_slope(name) is not None:
        return activation_laws(name)
    if name in ELSEWHERE:
        raise DomainError(f"component = {name!r}: not of one component; see {ELSEWHERE[name]}")
    raise unknown_name("component", name, components())


def components() -> tuple[str, ...]:
    """Names of every component, registered activations included."""
    registered = (name for name in activation_names() if name not in COMPONENTS)
    return (*COMPONENTS, *registered)


def recipe(laws: ComponentLaws) -> tuple[Any, ...]:
    """The arguments of `laws_by_recipe`: a name, and the functions of a registered activation.

    Raises:
        DomainError: the laws cannot be looked up by name.
    """
    function = registered_function(laws.name)
    arguments = (laws.name, *(function or ()))
    if laws_by_recipe(*arguments) is not laws:
        raise DomainError(f"the laws {laws.name!r} cannot be looked up by name")
    return arguments


def laws_by_recipe(name: str, *functions: Any) -> ComponentLaws:
    """The laws of a name; registers a user's activation if this process does not know it yet."""
    if functions and registered_function(name) is None:
        return register_activation(name, *functions)
    return component(name)


# --- the pages ------------------------------------------------------------------------------------


def component_page(record: ComponentLaws, level: int = 2) -> str:
    """Markdown of one component's laws under a heading of this level."""
    lines = [f"{'#' * level} {record.title}\n", f"`moments.component({record.name!r})`\n"]
    names = [name for theory in THEORIES for name in record.under(theory)]
    meanings = QUANTITIES | {n: n.replace("_", " ") for n in names if n not in QUANTITIES}
    for quantity, meaning in meanings.items():
        variants: dict[int, tuple[Law, list[str]]] = {}  # the theories that use each law
        for theory in THEORIES:
            law = record.under(theory).get(quantity)
            if law is not None:
                variants.setdefault(id(law), (law, []))[1].append(theory)
        lines += [_law(quantity, meaning, *each) for each in variants.values()]
    return "\n".join(lines)


def _law(quantity: str, meaning: str, law: Law, theories: list[str]) -> str:
    which = "every theory" if len(theories) == len(THEORIES) else ", ".join(theories)
    domain = "; ".join(f"`{name}` in {interval}" for name, interval in law.domain.items())
    lines = [
        f"**{quantity}**, {meaning} ({which}; {law.status})\n",
        f"$${law.latex()}$$\n",
        f"Source: {law.source}." + (f" Note: {law.note}." if law.note else ""),
    ]
    if domain:
        lines.append(f"Domain: {domain}.")
    return "\n".join(lines) + "\n"


def symbols_page() -> str:
    """Markdown table of every symbol: name, letter, meaning and domain."""
    rows = [f"| `{s.name}` | ${s.tex}$ | {s.meaning} | {s.domain} |" for s in SYMBOLS.values()]
    header = ["| name | symbol | meaning | domain |", "| --- | --- | --- | --- |"]
    return "\n".join([*header, *rows]) + "\n"
