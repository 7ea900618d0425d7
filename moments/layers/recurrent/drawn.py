"""Kernels of what drawn heads give, and of the gradients that they send back.

Pre-activations of a head are Gaussian at infinite width, of the kernel of what enters times the
variance of their weights, whatever is done with them behind. What is done here has no closed second
moments: norms divide by one draw's size, steps are softplus of Gaussians, keys are of unit length.
So heads of their real width are drawn, their sequences as wholes, and kernels are means over their
features. Draws have a fixed seed; where there are enough of one matrix's rows, their second moments
are exactly those wanted, so that what is linear in them is exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...engine.derivative import pullback

Array = Any

ENTRIES, LEAST_DRAWS, MOST_DRAWS = 1 << 24, 8, 2048
"""Numbers that draws hold, of matrices over pairs of tokens and of rows; and how many draws there
are at least and at most, over which means scatter."""

AT_ONCE = 1 << 21
"""Entries of matrices over pairs of tokens that are worked on at once."""


FORGOTTEN = 0.1
"""Part of a state that is left a token later, below which it is forgotten."""

RARE = 0.3
"""Share of the norm's mean gain that one draw in a hundred may have without a note."""


class Section(NamedTuple):
    """Rows of a mixer that read its input by one matrix.

    Attributes:
        drawn: of them in one draw.
        shared: by how many times as many heads they serve as are drawn with them.
    """

    rows: int
    drawn: int
    shared: float = 1.0


OF_SECTION = {"mixer_norm": "value", "rate": "mixer_step", "skip": "mixer_step"}

FIXED = ("decay",)
"""What heads differ in that no gradient reaches."""


class Head(Protocol):
    """What is drawn: one head, or several that share a norm or keys.

    Attributes:
        sections: by the name of their matrix.
        features: that one draw gives.
        pairs: matrices over pairs of tokens in one draw.
    """

    @property
    def block(self) -> Any: ...

    @property
    def sections(self) -> Mapping[str, Section]: ...

    @property
    def features(self) -> int: ...

    @property
    def pairs(self) -> int: ...

    def own(self, random: np.random.Generator, draws: int) -> dict[str, Array]:
        """Parameters that multiply no input, each with draws first; as many for a row as the
        section before the dot in their name, or `OF_SECTION`, has."""

    def kept(self, entering: dict[str, Array], own: dict[str, Array]) -> Array:
        """(draws, heads, ...) of a head's state, the part that is left a token later."""

    def before_norm(self, entering: dict[str, Array], own: dict[str, Array]) -> Array:
        """(..., features) of what a norm divides by its root mean square."""

    def __call__(self, entering: dict[str, Array], own: dict[str, Array]) -> Array:
        """(draws, L, features) of (draws, L, rows) by section."""


class Back(NamedTuple):
    """What came back.

    Attributes:
        kernels: (L, L) of the gradient at each section's pre-activations, per feature.
        own: expected squared gradient norms of the parameters that multiply no input.
    """

    kernels: dict[str, Array]
    own: dict[str, float]


class DrawnHeads:
    """Draws of a head on tokens of one kernel.

    Attributes:
        norms: (L, L) covariance over draws of the mixer of two tokens' squared norms, over its
            features; behind `forward`. What a head's values share, they share in all of them.

    Args:
        kernel: (L, L) of the input.
        gains: variance of pre-activations per unit of it, by section.
        sequences: equally long ones that the kernel holds one after the other.
        draws: how many; None: by the number of features.
    """

    def __init__(
        self,
        head: Head,
        kernel: Array,
        gains: Mapping[str, float],
        sequences: int = 1,
        draws: int | None = None,
    ) -> None:
        self.head, self.sequences, tokens = head, sequences, len(kernel)
        root = root_of(kernel)
        if draws is None:
            rows = sum(one.drawn for one in head.sections.values())
            many = ENTRIES // (tokens * (head.pairs * tokens + 4 * rows))
            draws = min(max(many, LEAST_DRAWS), MOST_DRAWS)
        self.draws = draws
        self.entering = {
            name: np.sqrt(gains[name]) * rows_of(draws, one.drawn, tokens, name) @ root
            for name, one in head.sections.items()
        }
        self.own = head.own(np.random.default_rng(0), draws)
        size = max(1, AT_ONCE // (head.pairs * tokens * tokens))
        self.parts = [slice(k, k + size) for k in range(0, draws, size)]

    def _given(self, part: slice) -> tuple[dict[str, Array], dict[str, Array]]:
        entering = {name: np.swapaxes(one[part], 1, 2) for name, one in self.entering.items()}
        return entering, {name: one[part] for name, one in self.own.items()}

    def forward(self) -> Array:
        """(L, L) second moments per feature of what leaves."""
        total, squares = 0.0, []
        for part in self.parts:
            entering, own = self._given(part)
            run = on_lists(self.head, list(entering), list(own), {}, self.sequences)
            leaving = run(*entering.values(), *own.values())
            total = total + gram(leaving)
            squares.append(np.mean(leaving * leaving, -1))
        apart = np.concatenate(squares)
        value = self.head.sections["value"]
        self.norms = np.cov(apart.T, ddof=0) * (value.drawn / value.rows)
        return total / (self.draws * self.head.features)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the draws say about the mixer's health, and about means over draws."""
        block = self.head.block
        entering, own = self._given(self.parts[0])
        first = next(iter(entering.values())).shape[1] // self.sequences
        given = {name: one[:, :first] for name, one in entering.items()}, own
        result = []
        gone = float(np.mean(self.head.kept(*given) < FORGOTTEN))
        if gone > 0.5:
            result.append(
                f"{100 * gone:.0f} % of the heads' states keep less than {FORGOTTEN:g} of "
                "themselves from one token to the next: these heads see little but their own token"
            )
        if not block.norm:
            return tuple(result)
        sizes = np.mean(self.head.before_norm(*given) ** 2, -1)
        epsilon = block.norm_epsilon
        share = float(np.mean(sizes / (sizes + epsilon)))
        if share < 0.5:
            result.append(
                f"the norm's epsilon {epsilon:.2g} is larger than most of what it normalises, of "
                f"mean square {float(np.mean(sizes)):.1g}: the branch gives {share:.1g} of what "
                "the norm would make of it, and is nearly dead"
            )
        gains = np.sort((1.0 / (sizes + epsilon)).ravel())
        rare = float(gains[-max(len(gains) // 100, 1) :].sum() / gains.sum())
        if rare > RARE and not getattr(block, "skip", 0.0):  # which keeps it from vanishing
            result.append(
                f"{100 * rare:.0f} % of what the norm multiplies gradients by comes from one draw "
                "in a hundred, in which a head gives almost nothing: means over draws are not "
                "what one draw shows"
            )
        return tuple(result)

    def backward(self, grad_out: Array) -> Back:
        """Of the (L, L) gradient per feature of what leaves."""
        head, root = self.head, root_of(grad_out)
        rows = rows_of(self.draws, head.features, len(grad_out), "gradient")
        kernels = {name: np.zeros_like(grad_out) for name in head.sections}
        squares = {name: 0.0 for name in self.own if name not in FIXED}
        for part in self.parts:
            entering, own = self._given(part)
            names, mine = list(entering), [name for name in own if name not in FIXED]
            run = on_lists(
                head,
                names,
                mine,
                {name: own[name] for name in own if name in FIXED},
                self.sequences,
            )
            _, pull = pullback(run, *entering.values(), *(own[name] for name in mine))
            grad_in = pull(np.swapaxes(rows[part] @ root, 1, 2))
            for name, one in zip(names, grad_in, strict=False):
                section = head.sections[name]
                share = section.shared / (self.draws * section.drawn)
                kernels[name] += gram(one) * share
            for name, one in zip(mine, grad_in[len(names) :], strict=True):
                first = name.partition(".")[0]
                of = head.sections[OF_SECTION.get(first, first)]
                share = of.rows / of.drawn * of.shared / self.draws
                squares[name] += float((one * one).sum()) * share
        return Back(kernels, squares)


def _for_each(x: Array, sequences: int) -> Array:
    """(draws * sequences, ...) of (draws, ...), the same for all sequences of a draw."""
    wide = np.broadcast_to(np.expand_dims(x, 1), (len(x), sequences, *x.shape[1:]))
    return np.reshape(wide, (len(x) * sequences, *x.shape[1:]))


def on_lists(
    head: Head, names: list[str], own: list[str], fixed: Any, sequences: int
) -> Callable[..., Array]:
    def run(*values: Array) -> Array:
        first, second = values[: len(names)], values[len(names) :]
        parameters = dict(zip(own, second, strict=True)) | fixed
        given = dict(zip(names, first, strict=True))
        if sequences == 1:
            return head(given, parameters)
        draws, tokens, _ = next(iter(given.values())).shape
        apart = {
            k: np.reshape(x, (draws * sequences, tokens // sequences, x.shape[-1]))
            for k, x in given.items()
        }
        each = {k: _for_each(x, sequences) for k, x in parameters.items()}
        return np.reshape(head(apart, each), (draws, tokens, head.features))

    return run


def gram(x: Array) -> Array:
    """(L, L) sums over draws and features of (draws, L, features)."""
    flat = np.swapaxes(x, 0, 1).reshape(x.shape[1], -1)
    return flat @ flat.T


def root_of(kernel: Array) -> Array:
    """The symmetric root of a kernel."""
    values, vectors = np.linalg.eigh(0.5 * (kernel + kernel.T))
    return (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T


@functools.lru_cache(maxsize=64)
def rows_of(draws: int, features: int, tokens: int, name: str) -> Array:
    """(draws, features, L) standard normal, another stream for every name; orthonormal over tokens
    where there are rows enough."""
    seed = [ord(letter) for letter in name]
    result = np.random.default_rng(seed).standard_normal((draws * features, tokens))
    if len(result) >= 2 * tokens:
        result = result @ np.linalg.inv(np.linalg.cholesky(result.T @ result / len(result))).T
    return result.reshape(draws, features, tokens)
