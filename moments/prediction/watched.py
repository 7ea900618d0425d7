"""A declaration under observation: every law that is evaluated, at its site and on its way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine import evaluation
from ..engine.composition import (
    BottomToTop,
    Chain,
    Component,
    Layer,
    Leaf,
    Parallel,
    Pullback,
    Pulled,
    Reader,
    ReaderPullback,
    Residual,
)
from ..engine.layout import Layout
from ..engine.state import Gradient, Kernel, Signal
from ..formulas.gated import gated
from ..formulas.kedia_chain import CORRELATED_RESIDUAL
from ..formulas.law import Law
from ..formulas.named_activations import activation_laws
from ..model.transformer import Transformer

KERNEL = "attention kernel"
GAIN = "gain"
DIRECTIONS = "directions"


@dataclass(frozen=True)
class Step:
    """One law at work, or one component that works by token.

    Attributes:
        site: of the network.
        way: "forward" or "backward".
        component, quantity: names under which `moments.component(...).law(...)` finds the law.
        law: the formula with its source; None for an "attention kernel", whose moments are sums
            over all pairs of tokens instead of one formula, for a norm's "gain", and for
            "directions" that a gradient lacks (`directions`).
        values: what its symbols were, averaged over tokens where resolved by token.
        result: what it gave, likewise.
    """

    site: str
    way: str
    component: str
    quantity: str
    law: Law | None
    values: dict[str, float]
    result: float

    @property
    def source(self) -> str:
        if self.component == GAIN:
            return "definition, times the mean square of the gain"
        if self.component == DIRECTIONS:
            return "derived here, what the gradient lacks along its signal, of order 1/width"
        if self.law is None:
            return "derived here, softmax of Gaussian logits over an arbitrary token kernel"
        return f"{self.law.source} [{self.law.status}]"


class Log:
    """Every law that is evaluated, at the site and on the way where it is."""

    def __init__(self, layout: Layout, names: dict[int, tuple[str, str]]) -> None:
        self.layout, self.names = layout, names
        self.steps: list[Step] = []
        self._where = ("", "")

    @contextmanager
    def listening(self) -> Iterator[None]:
        evaluation.observer = self._note
        try:
            yield
        finally:
            evaluation.observer = None

    @contextmanager
    def at(self, site: str, way: str) -> Iterator[list[Step]]:
        """While the component at a site is passed; gives what it adds to the steps."""
        before, self._where = self._where, (site, way)
        count = len(self.steps)
        added: list[Step] = []
        try:
            yield added
        finally:
            self._where = before
            added += self.steps[count:]

    def _note(self, law: Law, values: Any, result: Any) -> None:
        average = self._of_pairs if np.ndim(result) == 2 else self._of_tokens
        picked = {name: average(values[name]) for name in law.arguments}
        names = self.names.get(id(law), ("", ""))
        self.steps.append(Step(*self._where, *names, law, picked, average(result)))

    def _of_tokens(self, value: Any) -> float:
        if np.ndim(value) == 0:
            return float(value)
        diagonal, classes = np.ravel(value), self.layout.classes
        if classes is not None:
            return float(classes.mean(diagonal))
        return float(self.layout.token_average(Kernel.of_matrix(np.diag(diagonal)))[0])

    def _of_pairs(self, value: Any) -> float:
        """Over pairs of different tokens of a sequence."""
        if np.ndim(value) == 0:
            return float(value)
        count = max(np.shape(value))
        matrix, classes = np.broadcast_to(value, (count, count)), self.layout.classes
        if classes is not None:
            return float(Kernel(np.diagonal(matrix), matrix, classes).mean_pairs())
        return float(self.layout.token_average(Kernel.of_matrix(matrix))[1])

    def complete(self, leaf: Component, way: str, kernel: Kernel, steps: list[Step]) -> None:
        """Add what a component gives where none of its laws said so."""
        prefix = "" if way == "forward" else "grad_"
        component = GAIN if hasattr(leaf, "gain") else DIRECTIONS
        if getattr(leaf, "mixes_tokens", False):
            component = KERNEL
        for quantity, value in zip(
            ("variance", "covariance"), self.layout.token_average(kernel), strict=True
        ):
            name, given = prefix + quantity, float(value)
            said = [step.result for step in steps if step.quantity == name]
            if not said or abs(said[-1] - given) > 1e-9 * max(abs(given), 1e-12):
                self.steps.append(Step(leaf.label, way, component, name, None, {}, given))

    def sum(self, node: Residual, way: str, kept: Kernel, added: Kernel, total: Any) -> None:
        """A residual addition: what is kept, what the branch adds, and the sum."""
        one, two = (float(self.layout.token_average(k)[0]) for k in (kept, added))
        skip, branch = float(node.skip_scale**2), float(node.branch_scale**2)
        prefix = "" if way == "forward" else "grad_"
        # Not correlated at initialisation, but for what scale invariance takes from a gradient and
        # norms that persist add to it (`directions`).
        cross = 2 * np.sqrt(skip * branch * one * two)
        overlap = 0.0
        if total is not None and cross:
            whole = float(self.layout.token_average(total)[0])
            overlap = float((whole - skip * one - branch * two) / cross)
        values = {
            "skip_square": skip,
            "branch_square": branch,
            "x_variance" if way == "forward" else "grad_variance": one,
            f"{prefix}branch_variance": two,
            f"{prefix}branch_correlation": overlap,
        }
        law = CORRELATED_RESIDUAL.law(f"{prefix}variance")
        names = (CORRELATED_RESIDUAL.name, f"{prefix}variance")
        self.steps.append(Step(node.label, way, *names, law, values, float(law.of(values))))

    def watched(self, component: Component) -> Component:
        """The same declaration with every leaf under observation."""
        if isinstance(component, Chain):
            return Chain(tuple(map(self.watched, component.parts)), component.label)
        if isinstance(component, Parallel):
            return Parallel(tuple(map(self.watched, component.branches)), component.label)
        if isinstance(component, Layer):
            return dataclasses.replace(component, body=self.watched(component.body))
        if isinstance(component, BottomToTop):
            return dataclasses.replace(
                component,
                attention=self._inside(component.attention)[0],
                norm=self.watched(component.norm),
                ffn=self._inside(component.ffn)[0],
            )
        if isinstance(component, Residual):
            return self._residual(component)
        if isinstance(component, Reader):
            return _WatchedReader(component, self)
        return _WatchedLeaf(component, self)  # type: ignore[arg-type]

    def _inside(self, node: Residual) -> tuple[Residual, _Probe]:
        """The node with its branch under observation, and what sees the branch's input."""
        first, last = _Probe("branch.in"), _Probe("branch.out")

        def forwards() -> None:
            self.sum(node, "forward", first.signal.kernel, last.signal.kernel, None)

        last.forwards = forwards
        branch = Chain((first, self.watched(node.branch), last))
        return dataclasses.replace(node, branch=branch), first

    def _residual(self, node: Residual) -> Component:
        inner, branch = self._inside(node)
        whole, total = _Probe("sum.in"), _Probe("sum.out")

        def backwards() -> None:
            # The branch was sent branch_scale^2 of the gradient, and the law counts it again.
            scale = node.branch_scale**2
            sent = branch.gradient.kernel.scaled(1 / scale if scale else 0.0)
            self.sum(node, "backward", total.gradient.kernel, sent, whole.gradient.kernel)

        whole.backwards = backwards
        return Chain((whole, inner, total))


class _Probe(Leaf):
    """Passes everything on and keeps it."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.signal: Any = None
        self.gradient: Any = None
        self.forwards: Any = None
        self.backwards: Any = None

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        self.signal = signal
        if self.forwards is not None:
            self.forwards()

        def pullback(gradient: Gradient) -> Pulled:
            self.gradient = gradient
            if self.backwards is not None:
                self.backwards()
            return Pulled(gradient)

        return signal, pullback


class _WatchedLeaf(Leaf):
    def __init__(self, leaf: Leaf, log: Log) -> None:
        self.leaf, self.log, self.label = leaf, log, leaf.label
        self.normalises = getattr(leaf, "normalises", False)
        self.mixes_tokens = getattr(leaf, "mixes_tokens", False)

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        with self.log.at(self.label, "forward") as steps:
            output, pull = self.leaf.forward(signal)
        self.log.complete(self.leaf, "forward", output.kernel, steps)

        def pullback(gradient: Gradient) -> Pulled:
            with self.log.at(self.label, "backward") as steps:
                pulled = pull(gradient)
            self.log.complete(self.leaf, "backward", pulled.gradient.kernel, steps)
            return pulled

        return output, pullback


class _WatchedReader(Reader):
    def __init__(self, reader: Reader, log: Log) -> None:
        self.reader, self.log, self.label = reader, log, reader.label
        self.mixes_tokens = getattr(reader, "mixes_tokens", False)

    def attend(self, signal: Signal, memory: Signal) -> tuple[Signal, ReaderPullback]:
        with self.log.at(self.label, "forward") as steps:
            output, pull = self.reader.attend(signal, memory)
        self.log.complete(self.reader, "forward", output.kernel, steps)

        def pullback(gradient: Gradient) -> tuple[Pulled, Gradient]:
            with self.log.at(self.label, "backward") as steps:
                pulled, to_memory = pull(gradient)
            self.log.complete(self.reader, "backward", pulled.gradient.kernel, steps)
            return pulled, to_memory

        return output, pullback


# What the registry calls the gated forms of activations.
GATED = {
    "silu": "swiglu",
    "gelu": "geglu",
    "gelu_tanh": "geglu_tanh",
    "relu": "reglu",
    "sigmoid": "glu",
    "identity": "bilinear",
}


def names_of_laws(model: Transformer) -> dict[int, tuple[str, str]]:
    """Where the registry has each law."""
    from ..formulas.registry import component, components

    found: dict[int, tuple[str, str]] = {}
    for name in components():
        for theory in ("simplified", "published", "refined"):
            for quantity, law in component(name).under(theory).items():  # type: ignore[arg-type]
                found.setdefault(id(law), (name, quantity))
    if model.gated:
        product = gated(activation_laws(model.activation))
        name = GATED.get(model.activation, product.name)
        found |= {id(law): (name, q) for q, law in product.under("refined").items()}
    return found
