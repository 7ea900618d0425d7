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
from typing import Any, NamedTuple

import numpy as np

from ...engine.derivative import pullback
from ...errors import DomainError

Array = Any

ENTRIES, LEAST_DRAWS, MOST_DRAWS = 1 << 24, 8, 2048
"""Numbers that draws hold, of matrices over pairs of tokens and of rows; and how many draws there
are at least and at most, over which means scatter."""

SINGLE, SQUARED = np.float32, 1e-6
"""Precision of draws whose pre-activations have variances between this and one over it; sums over
draws, and all others, are of double."""

AT_ONCE = 1 << 21
"""Entries of matrices over pairs of tokens that are worked on at once."""


FORGOTTEN = 0.1
"""Part of a state that is left a token later, below which it is forgotten."""

MOST_RESPONSE = 0.9
"""Of a gradient to what leaves: at 1 a draw that gives nothing receives without bound."""

SCATTERED = 0.05
"""Relative error of a token's own moments, as a mean over draws, from which a note is made."""

TINY = 1e-300
"""Below which a token has no size to vary."""

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


class Inner(NamedTuple):
    """A matrix that reads what a head makes of its input.

    Attributes:
        fan_in, fan_out: in one draw.
        served: squared gradient of the whole matrix over that of one draw.
    """

    fan_in: int
    fan_out: int
    served: float


OF_SECTION = {"mixer_norm": "value", "rate": "mixer_step", "skip": "mixer_step"}

FIXED = ("decay", "alibi", "relative_bias")
"""What heads differ in that no gradient reaches."""


class Head:
    """What is drawn: one head, or several that share a norm or keys.

    Attributes:
        sections: by the name of their matrix.
        inner: by name; most heads have none of these, nor of the next two.
        features: that one draw gives.
        pairs, states: matrices over pairs of tokens in one draw, and numbers that its states hold.
        effort: times as many draws as others have, where what all features share scatters most.
        most: features of one draw at most, where a part of them can stand for all.
    """

    block: Any

    @property
    def sections(self) -> dict[str, Section]:
        raise NotImplementedError

    @property
    def inner(self) -> dict[str, Inner]:
        return {}

    @property
    def features(self) -> int:
        raise NotImplementedError

    @property
    def pairs(self) -> int:
        return 0

    @property
    def states(self) -> int:
        return 0

    @property
    def effort(self) -> int:
        return 1

    def own(self, random: np.random.Generator, draws: int) -> dict[str, Array]:
        """Parameters that multiply no input, each with draws first; as many for a row as the
        section before the dot in their name, or `OF_SECTION`, has."""
        raise NotImplementedError

    def kept(self, entering: dict[str, Array], own: dict[str, Array]) -> Array:
        """(draws, heads, ...) of a head's state, the part that is left a token later."""
        raise NotImplementedError

    def before_norm(self, entering: dict[str, Array], own: dict[str, Array]) -> Array:
        """(..., features) of what a norm divides by its root mean square."""
        raise NotImplementedError

    def __call__(self, entering: dict[str, Array], own: dict[str, Array]) -> Array:
        """(draws, L, features) of (draws, L, rows) by section."""
        raise NotImplementedError


class Back(NamedTuple):
    """What came back.

    Attributes:
        kernels: (L, L) of the gradient at each section's pre-activations, per feature.
        own: expected squared gradient norms of the parameters that multiply no input.
    """

    kernels: dict[str, Array]
    own: dict[str, float]


class Health(NamedTuple):
    """Of a mixer's draws.

    Attributes:
        forgotten: part of the heads' states that keep less than `FORGOTTEN` a token later.
        size, epsilon: mean square of what the norm divides by, and what is added to it.
        share: of what the norm would give without epsilon.
        rare: of what it multiplies gradients by, the part of one draw in a hundred.
    """

    forgotten: float
    size: float = 1.0
    epsilon: float = 0.0
    share: float = 1.0
    rare: float = 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """What is out of order."""
        forgets = (self.forgets,) if self.forgotten > 0.5 else ()
        return (*forgets, self.swallows) if self.share < 0.5 else forgets

    @property
    def forgets(self) -> str:
        return (
            f"{100 * self.forgotten:.0f} % of the heads' states keep less than {FORGOTTEN:g} of "
            "themselves from one token to the next: these heads see little but their own token"
        )

    @property
    def swallows(self) -> str:
        return (
            f"the norm's epsilon {self.epsilon:.2g} is larger than most of what it normalises, of "
            f"mean square {self.size:.1g}: the branch gives {self.share:.1g} of what the norm "
            "would make of it, and is nearly dead"
        )


class DrawnHeads:
    """Draws of a head on tokens of one kernel.

    Attributes:
        norms: (L, L) covariance over draws of the mixer of two tokens' squared norms, over its
            features; behind `forward`. What a head's values share, they share in all of them.

    Args:
        kernel: (L, L) of the input.
        gains: variance of pre-activations per unit of it, by section; of what inner matrices make
            per unit of what they read.
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
        self.root, self.gains = root_of(kernel), gains
        sizes = [gains[name] * float(np.mean(np.diag(kernel))) for name in head.sections]
        single = min(sizes) > SQUARED and max(sizes) < 1 / SQUARED
        self.dtype = SINGLE if single else float
        if draws is None:
            rows = sum(one.drawn for one in head.sections.values())
            # states pass in one sweep over tokens, for the time of an eighth of their numbers
            many = tokens * (head.pairs * tokens + head.states // 8 + 4 * rows)
            draws = min(max(head.effort * ENTRIES // many, LEAST_DRAWS), MOST_DRAWS)
        self.draws = draws
        size = max(1, AT_ONCE // (tokens * (head.pairs * tokens + head.states)))
        self.parts = [slice(k, k + size) for k in range(0, draws, size)]

    def _given(self, part: slice) -> tuple[dict[str, Array], dict[str, Array]]:
        head, tokens = self.head, len(self.root)
        entering = {}
        for name, one in head.sections.items():
            rows = rows_of(self.draws, one.drawn, tokens, name)[part]
            root = (np.sqrt(self.gains[name]) * self.root).astype(self.dtype)
            entering[name] = np.swapaxes(rows @ root, 1, 2)
        own = {name: one[part] for name, one in _own(head, self.draws).items()}
        for name, inner in head.inner.items():
            own[name] = own[name] * self.dtype(np.sqrt(self.gains[name] / inner.fan_in))
        return entering, own

    def forward(self) -> Array:
        """(L, L) second moments per feature of what leaves."""
        total, products, squares = 0.0, 0.0, []
        for part in self.parts:
            entering, own = self._given(part)
            run = on_lists(self.head, list(entering), list(own), {}, self.sequences)
            leaving = run(*entering.values(), *own.values())
            total = total + gram(leaving)
            products = products + sum((one @ one.T).astype(float) ** 2 for one in leaving)
            squares.append(np.mean(leaving * leaving, -1).astype(float))
        apart, value = np.concatenate(squares), self.head.sections["value"]
        self.part = 1.0 if "key" in self.head.inner else value.drawn / value.rows
        self.norms = np.atleast_2d(np.cov(apart.T, ddof=0)) * self.part
        mean, features = total / self.draws, self.head.features
        varies = np.maximum(products / self.draws - mean * mean, 0.0) / features**2
        self.overlaps = of_overlaps(varies * self.part, self.norms)
        self.scatter = float(np.sqrt(np.mean(np.diag(self.norms)) / self.part / self.draws))
        self.scatter /= max(float(apart.mean()), TINY)
        self.sizes = 1.0 + self.part * (apart / np.maximum(apart.mean(0), TINY) - 1.0)
        return total / (self.draws * self.head.features)

    def _first(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Some draws on the first sequence."""
        entering, own = self._given(self.parts[0])
        first = next(iter(entering.values())).shape[1] // self.sequences
        return {name: one[:, :first] for name, one in entering.items()}, own

    @functools.cached_property
    def health(self) -> Health:
        """What is left of the state, and what the norm makes of it."""
        head, given = self.head, self._first()
        gone = float(np.mean(head.kept(*given) < FORGOTTEN))
        if not head.block.norm:
            return Health(gone)
        sizes = np.mean(head.before_norm(*given) ** 2, -1)
        epsilon = head.block.norm_epsilon
        gains = np.sort((1.0 / (sizes + epsilon)).ravel())
        rare = float(gains[-max(len(gains) // 100, 1) :].sum() / gains.sum())
        share = float(np.mean(sizes / (sizes + epsilon)))
        return Health(gone, float(np.mean(sizes)), epsilon, share, rare)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the draws say about the mixer's health, and about means over draws."""
        at = self.health
        result = list(at.notes)
        if "key" in self.head.inner and self.scatter > SCATTERED:
            result.append(
                f"what all features share varies from draw to draw: the mean over {self.draws} "
                f"draws gives a token's own moments to {100 * self.scatter:.0f} %"
            )
        # a skip keeps what the norm divides by from vanishing
        if at.rare > RARE and not getattr(self.head.block, "skip", 0.0):
            result.append(
                f"{100 * at.rare:.0f} % of what the norm multiplies gradients by comes from one "
                "draw in a hundred, in which a head gives almost nothing: means over draws are not "
                "what one draw shows"
            )
        return tuple(result)

    def backward(self, grad_out: Array, response: Array = 0.0, radial: Array = 1.0) -> Back:
        """Of the (L, L) gradient per feature of what leaves, behind `forward`.

        Args:
            response, radial: (L,) of the gradient (`Gradient.norm_response`, `.radial`): draws that
                give much receive little, and less along what they give.
        """
        unit = max(float(np.mean(np.diag(grad_out))), TINY)
        head, root = self.head, root_of(grad_out / unit).astype(self.dtype)
        lost = 1.0 - np.sqrt(1.0 - (1.0 - np.broadcast_to(radial, len(grad_out))) * self.part)
        weights = 1.0 / (1.0 + np.minimum(response, MOST_RESPONSE) * (self.sizes - 1.0))
        weights = np.sqrt(weights / weights.mean(0))[..., None].astype(self.dtype)
        rows = rows_of(self.draws, head.features, len(grad_out), "gradient")
        kernels = {name: np.zeros_like(grad_out) for name in head.sections}
        squares = {name: 0.0 for name in _own(head, self.draws) if name not in FIXED}
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
            value, pull = pullback(run, *entering.values(), *(own[name] for name in mine))
            arriving = np.swapaxes(rows[part] @ root, 1, 2) * weights[part]
            squares_of = np.maximum(
                np.sum(value * value, -1, keepdims=True), np.finfo(value.dtype).tiny
            )
            along = np.sum(arriving * value, -1, keepdims=True) / squares_of
            grad_in = pull(arriving - lost[:, None].astype(self.dtype) * along * value)
            for name, one in zip(names, grad_in, strict=False):
                section = head.sections[name]
                share = unit * section.shared / (self.draws * section.drawn)
                kernels[name] += gram(one) * share
            for name, one in zip(mine, grad_in[len(names) :], strict=True):
                squares[name] += float((one * one).sum()) * unit * served(head, name) / self.draws
        return Back(kernels, squares)


def served(head: Head, name: str) -> float:
    """Squared gradient of a parameter that multiplies no input, over that of its part in a draw."""
    first = name.partition(".")[0]
    first = OF_SECTION.get(first, first)
    if first in head.inner:
        return head.inner[first].served
    of = head.sections[first]
    return of.rows / of.drawn * of.shared


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
        draws = len(next(iter(given.values())))
        apart = {
            k: np.reshape(x, (draws * sequences, x.shape[1] // sequences, x.shape[2]))
            for k, x in given.items()
        }
        each = {k: _for_each(x, sequences) for k, x in parameters.items()}
        result = head(apart, each)
        return np.reshape(result, (draws, result.shape[1] * sequences, result.shape[2]))

    return run


def of_overlaps(varies: Array, norms: Array) -> Array:
    """Y of `moments.engine.fluctuation` whose own parts give different tokens' overlaps these
    variances, beside what their squared norms share.

    Norms may vary much more than overlaps of tokens that are not alike, as those of products do.
    """
    own = np.maximum(2.0 * varies - norms, 0.0)
    np.fill_diagonal(own, 0.0)
    if not (total := own.sum()):
        return norms
    # y_kk y_ll is `own`: its rows' sums over the root of their own
    result = np.maximum(norms, 0.0)
    np.fill_diagonal(result, (own.sum(-1) ** 2) / total)
    return result


def gram(x: Array) -> Array:
    """(L, L) sums over draws and features of (draws, L, features)."""
    flat = np.swapaxes(x, 0, 1).reshape(x.shape[1], -1)
    return (flat @ flat.T).astype(float)


def root_of(kernel: Array) -> Array:
    """The symmetric root of a kernel."""
    if not np.all(np.isfinite(kernel)):
        raise DomainError(
            "moments at a mixer are no numbers: a token is zero, as padding inside a text is, and "
            "a norm divides by it; give norm_epsilon, or sequences of one length"
        )
    values, vectors = np.linalg.eigh(0.5 * (kernel + kernel.T))
    return (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T


@functools.lru_cache(maxsize=8)
def _own(head: Head, draws: int) -> dict[str, Array]:
    """Parameters of so many draws, inner matrices with entries of variance 1."""
    random = np.random.default_rng(0)
    sizes = {name: (draws, one.fan_in, one.fan_out) for name, one in head.inner.items()}
    inner = {name: random.standard_normal(size) for name, size in sizes.items()}
    given = {**head.own(random, draws), **inner}
    return {name: one.astype(SINGLE) for name, one in given.items()}


@functools.lru_cache(maxsize=16)
def rows_of(draws: int, features: int, tokens: int, name: str) -> Array:
    """(draws, features, L) standard normal, another stream for every name; orthonormal over tokens
    where there are rows enough."""
    seed = [ord(letter) for letter in name]
    result = np.random.default_rng(seed).standard_normal((draws * features, tokens))
    if len(result) >= 2 * tokens:
        result = result @ np.linalg.inv(np.linalg.cholesky(result.T @ result / len(result))).T
    return result.astype(SINGLE).reshape(draws, features, tokens)
