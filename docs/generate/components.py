"""One page per component: every law with its formula, source, domain and status, and a picture."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from figure import svg

import moments
from moments.formulas.pages import component_page, symbols_page
from moments.formulas.registry import COMPONENTS, STACKS

QUICK = bool(os.environ.get("MOMENTS_SITE_QUICK"))
"""Whether a few components and schemes stand for all: what a test of the build needs."""

FEW = ("relu", "attention", "cross_entropy", "post_ln_chain")
ALL = {n: r for n, r in {**COMPONENTS, **STACKS}.items() if not QUICK or n in FEW}


def navigation() -> list[Any]:
    """Entries of the section."""
    own = [
        {record.title: f"components/{name}.md"}
        for name, record in ALL.items()
        if name in COMPONENTS
    ]
    whole = [
        {record.title: f"components/{name}.md"} for name, record in ALL.items() if name in STACKS
    ]
    return [
        "components/index.md",
        {"Components": own},
        {"Whole networks": whole},
        {"Symbols": "components/symbols.md"},
    ]


def pages() -> dict[str, str | bytes]:
    """Pages and pictures."""
    found: dict[str, str | bytes] = {"components/index.md": _index(), "components/symbols.md": ""}
    found["components/symbols.md"] = "# Symbols\n\n" + symbols_page()
    for name, record in ALL.items():
        text = component_page(record, level=1)
        picture = _picture(name)
        if picture is not None:
            found[f"components/{name}.svg"] = picture
            text += (
                f"\n## Predicted and simulated\n\n![{record.title}: predicted and simulated]"
                f"({name}.svg)\n\nLines are the laws, points means over 40,000 Gaussian draws of "
                "the function itself, bars two standard errors.\n"
            )
        found[f"components/{name}.md"] = text
    return found


def _index() -> str:
    lines = [
        "# Formulas",
        "",
        "Every formula of the package, a page per component, made from the laws themselves. The "
        "same from the command line: `moments formulas NAME`; from Python: "
        '`moments.component(NAME).law("variance")`.',
        "",
        "*Exact* means exact under Gaussian inputs; *asymptotic* names in its note what must be "
        "large; *fitted* is an approximation that its authors fitted.",
        "",
        "| component | name | laws |",
        "| --- | --- | --- |",
    ]
    for name, record in ALL.items():
        laws = sorted({q for theory in ("refined", "published") for q in record.under(theory)})
        lines.append(f"| [{record.title}]({name}.md) | `{name}` | {', '.join(laws)} |")
    return "\n".join(lines) + "\n"


# --- pictures -------------------------------------------------------------------------------------


@functools.cache
def functions() -> dict[str, Callable[[Any], Any]]:
    """Activations, written out again: no law is used to check a law."""
    from scipy.special import erf, expit

    return {
        "relu": lambda x: np.maximum(x, 0),
        "gelu": lambda x: x * (1 + erf(x / 2**0.5)) / 2,
        "gelu_tanh": lambda x: x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
        "identity": lambda x: x,
        "silu": lambda x: x * expit(x),
        "tanh": np.tanh,
        "relu_squared": lambda x: np.maximum(x, 0) ** 2,
        "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
        "quick_gelu": lambda x: x * expit(1.702 * x),
        "sigmoid": expit,
        "softplus": lambda x: np.logaddexp(x, 0),
        "mish": lambda x: x * np.tanh(np.logaddexp(x, 0)),
        "erf": erf,
    }


def _picture(name: str) -> bytes | None:
    if name not in functions() or QUICK:
        return None
    function, laws = functions()[name], moments.component(name)
    random = np.random.default_rng(0)
    first, second = random.normal(size=(2, 40_000))

    def draw(axes: Any) -> None:
        left, right = axes
        variances = np.geomspace(0.1, 8, 60)
        left.plot(variances, laws.law("variance")(x_variance=variances), color="C0")
        for v in np.geomspace(0.1, 8, 7):
            y = function(np.sqrt(v) * first)
            square = (y - y.mean()) ** 2
            error = 2 * square.std() / len(y) ** 0.5
            left.errorbar(v, square.mean(), error, fmt="o", color="C1", ms=4)
        left.set(xscale="log", yscale="log", xlabel="input variance", ylabel="output variance")
        r = np.linspace(-0.99, 0.99, 80)
        given = {"x_variance": 1.0, "x_other_variance": 1.0}
        law = laws.law("covariance")
        known = {k: v for k, v in given.items() if k in law.arguments}
        right.plot(r, law(x_correlation=r, **known), color="C0", label="law")
        for one in np.linspace(-0.9, 0.9, 7):
            y = function(first)
            z = function(one * first + (1 - one * one) ** 0.5 * second)
            product = (y - y.mean()) * (z - z.mean())
            error = 2 * product.std() / len(y) ** 0.5
            right.errorbar(one, product.mean(), error, fmt="o", color="C1", ms=4)
        right.errorbar([], [], [], fmt="o", color="C1", ms=4, label="simulated")
        right.set(xlabel="input correlation, at unit variance", ylabel="output covariance")
        right.legend(frameon=False)

    return svg(draw, f"{laws.title}: law and simulation")
