"""Kernels of outputs and gradients of a mixer, averaged over sampled heads.

At infinite width of the input, a head's pre-activations are Gaussian with the input's kernel times
the variance of their weights. The heads here have no closed second moments: norms divide by the
norm of one draw, steps are softplus of Gaussians, keys have unit length. So heads of their real
width are sampled on whole sequences, and kernels are means over their features. The seed is fixed;
if a matrix has enough sampled rows, their second moments are made exact, and with them everything
linear in these rows.
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
"""Total entries of all draws (matrices over pairs of tokens, and rows), and the least and largest
number of draws."""

SINGLE, SQUARED = np.float32, 1e-6
"""Precision of draws if the variances of pre-activations are between this number and its inverse;
otherwise, and for sums over draws, double precision is used."""

AT_ONCE = 1 << 21
"""Entries of matrices over pairs of tokens that are processed at a time."""


FORGOTTEN = 0.1
"""Fraction of a state kept at the next token below which the state counts as forgotten."""

MOST_RESPONSE = 0.9
"""Cap on the gradient's response to the output's norm: at 1 the gradient of a draw with a vanishing
output is unbounded."""

SCATTERED = 0.05
"""Relative error of a token's second moment, as a mean over draws, beyond which a note warns."""

TINY = 1e-300
"""Floor of second moments that divide."""

RARE = 0.3
"""Fraction of the norm's mean gain due to one draw in a hundred beyond which a note warns."""


class Section(NamedTuple):
    """The rows of one input matrix of a mixer.

    Attributes:
        rows: in the mixer.
        drawn: in one draw.
        shared: number of heads that use a row, over that in one draw.
    """

    rows: int
    drawn: int
    shared: float = 1.0


class Inner(NamedTuple):
    """A matrix inside a head.

    Attributes:
        fan_in, fan_out: in one draw.
        served: squared gradient of the whole matrix over that of one draw.
    """

    fan_in: int
    fan_out: int
    served: float


OF_SECTION = {"mixer_norm": "value", "rate": "mixer_step", "skip": "mixer_step"}

FIXED = ("decay", "alibi", "relative_bias")
"""Parameters that differ between heads and receive no gradient."""


class Head:
    """The unit of sampling: one head, or several that share a norm or keys.

    Attributes:
        sections: input matrices, by name.
        inner: matrices inside the head, by name; most heads have none.
        features: of one draw's output.
        pairs, states: number of matrices over pairs of tokens, and of state entries, in one draw.
        effort: factor on the number of draws, for heads whose common factors fluctuate most.
        most: most features of one draw, if a part of them is representative.
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
        """Parameters other than matrices, (draws, ...); their rows are those of the section before
        the dot in their name, or of `OF_SECTION`."""
        raise NotImplementedError

    def kept(self, entering: dict[str, Array], own: dict[str, Array]) -> Array:
        """(draws, heads, ...) fraction of a head's state that is kept at the next token."""
        raise NotImplementedError

    def before_norm(self, entering: dict[str, Array], own: dict[str, Array]) -> Array:
        """(..., features) input of the norm."""
        raise NotImplementedError

    def __call__(self, entering: dict[str, Array], own: dict[str, Array]) -> Array:
        """(draws, L, features) output, from (draws, L, rows) pre-activations by section."""
        raise NotImplementedError


class Back(NamedTuple):
    """Gradients of a mixer.

    Attributes:
        kernels: (L, L) of the gradient at each section's pre-activations, per feature.
        own: expected squared gradient norms of the parameters other than matrices.
    """

    kernels: dict[str, Array]
    own: dict[str, float]


class Health(NamedTuple):
    """Diagnostics of a mixer, from its draws.

    Attributes:
        forgotten: fraction of the states of which less than `FORGOTTEN` is kept at the next token.
        size, epsilon: mean square of the norm's input, and the norm's epsilon.
        share: mean square of the norm's output.
        rare: fraction of the norm's mean gain due to one draw in a hundred.
    """

    forgotten: float
    size: float = 1.0
    epsilon: float = 0.0
    share: float = 1.0
    rare: float = 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on problems of the mixer."""
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
    """Sampled heads on tokens of one kernel.

    Attributes:
        norms: (L, L) covariance over draws of two tokens' squared norms of the mixer's output, per
            feature; available after `forward`.

    Args:
        kernel: (L, L) of the input.
        gains: variance of pre-activations per unit of the kernel, by section; for inner matrices
            of outputs per unit of their inputs.
        sequences: number of equally long sequences concatenated in the kernel.
        draws: number of draws; None: by the size of a draw.
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
            rows = sum(section.drawn for section in head.sections.values())
            # a sweep over states takes an eighth of the time per entry
            entries = tokens * (head.pairs * tokens + head.states // 8 + 4 * rows)
            draws = min(max(head.effort * ENTRIES // entries, LEAST_DRAWS), MOST_DRAWS)
        self.draws = draws
        size = max(1, AT_ONCE // (tokens * (head.pairs * tokens + head.states)))
        self.parts = [slice(k, k + size) for k in range(0, draws, size)]

    def _sampled(self, part: slice) -> tuple[dict[str, Array], dict[str, Array]]:
        """Pre-activations by section, and other parameters, of some draws."""
        head, tokens = self.head, len(self.root)
        entering = {}
        for name, section in head.sections.items():
            rows = rows_of(self.draws, section.drawn, tokens, name)[part]
            root = (np.sqrt(self.gains[name]) * self.root).astype(self.dtype)
            entering[name] = np.swapaxes(rows @ root, 1, 2)
        own = {name: values[part] for name, values in _own(head, self.draws).items()}
        for name, inner in head.inner.items():
            own[name] = own[name] * self.dtype(np.sqrt(self.gains[name] / inner.fan_in))
        return entering, own

    def forward(self) -> Array:
        """(L, L) second moments per feature of the output."""
        total, products, squares = 0.0, 0.0, []
        for part in self.parts:
            entering, own = self._sampled(part)
            run = on_lists(self.head, list(entering), list(own), {}, self.sequences)
            output = run(*entering.values(), *own.values())
            total = total + gram(output)
            products = products + sum((y @ y.T).astype(float) ** 2 for y in output)
            squares.append(np.mean(output * output, -1).astype(float))
        by_draw, value = np.concatenate(squares), self.head.sections["value"]
        self.part = 1.0 if "key" in self.head.inner else value.drawn / value.rows
        self.norms = np.atleast_2d(np.cov(by_draw.T, ddof=0)) * self.part
        mean, features = total / self.draws, self.head.features
        variance = np.maximum(products / self.draws - mean * mean, 0.0) / features**2
        self.overlaps = of_overlaps(variance * self.part, self.norms)
        self.scatter = float(np.sqrt(np.mean(np.diag(self.norms)) / self.part / self.draws))
        self.scatter /= max(float(by_draw.mean()), TINY)
        self.sizes = 1.0 + self.part * (by_draw / np.maximum(by_draw.mean(0), TINY) - 1.0)
        return total / (self.draws * self.head.features)

    def _first(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """`_sampled` for some draws on the first sequence."""
        entering, own = self._sampled(self.parts[0])
        first = next(iter(entering.values())).shape[1] // self.sequences
        return {name: rows[:, :first] for name, rows in entering.items()}, own

    @functools.cached_property
    def health(self) -> Health:
        """Diagnostics of states and norm."""
        head, sampled = self.head, self._first()
        gone = float(np.mean(head.kept(*sampled) < FORGOTTEN))
        if not head.block.norm:
            return Health(gone)
        sizes = np.mean(head.before_norm(*sampled) ** 2, -1)
        epsilon = head.block.norm_epsilon
        gains = np.sort((1.0 / (sizes + epsilon)).ravel())
        rare = float(gains[-max(len(gains) // 100, 1) :].sum() / gains.sum())
        share = float(np.mean(sizes / (sizes + epsilon)))
        return Health(gone, float(np.mean(sizes)), epsilon, share, rare)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on problems of the mixer, and on the errors of means over draws."""
        at = self.health
        result = list(at.notes)
        if "key" in self.head.inner and self.scatter > SCATTERED:
            result.append(
                f"what all features share varies from draw to draw: the mean over {self.draws} "
                f"draws gives a token's own moments to {100 * self.scatter:.0f} %"
            )
        # with a skip the norm's input does not vanish
        if at.rare > RARE and not getattr(self.head.block, "skip", 0.0):
            result.append(
                f"{100 * at.rare:.0f} % of what the norm multiplies gradients by comes from one "
                "draw in a hundred, in which a head gives almost nothing: means over draws are not "
                "what one draw shows"
            )
        return tuple(result)

    def backward(self, grad_out: Array, response: Array = 0.0, radial: Array = 1.0) -> Back:
        """Gradients from the (L, L) kernel of that at the output, per feature; after `forward`.

        Args:
            response, radial: (L,) `Gradient.norm_response` and `.radial`: the gradient is smaller
                for draws of large output, and reduced along the output.
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
            entering, own = self._sampled(part)
            names, trained = list(entering), [name for name in own if name not in FIXED]
            fixed = {name: own[name] for name in own if name in FIXED}
            run = on_lists(head, names, trained, fixed, self.sequences)
            value, pull = pullback(run, *entering.values(), *(own[name] for name in trained))
            at_output = np.swapaxes(rows[part] @ root, 1, 2) * weights[part]
            size = np.maximum(np.sum(value * value, -1, keepdims=True), np.finfo(value.dtype).tiny)
            along = np.sum(at_output * value, -1, keepdims=True) / size
            grad_in = pull(at_output - lost[:, None].astype(self.dtype) * along * value)
            for name, gradient in zip(names, grad_in, strict=False):
                section = head.sections[name]
                share = unit * section.shared / (self.draws * section.drawn)
                kernels[name] += gram(gradient) * share
            for name, gradient in zip(trained, grad_in[len(names) :], strict=True):
                square, (times, shared) = float((gradient * gradient).sum()), copies(head, name)
                squares[name] += square * unit * (times * shared) / self.draws
        return Back(kernels, squares)


class Copies(NamedTuple):
    """Copies of a drawn parameter that multiplies no input: how often the block has it (`times`),
    and how many independent draws of the function use each copy (`shared`). Their product is the
    parameter's squared gradient over that of its part in a draw."""

    times: float
    shared: float


def copies(head: Any, name: str) -> Copies:
    """Copies of a head's own parameter."""
    if hasattr(head, "copies"):
        result: Copies = head.copies(name)
        return result
    first = name.partition(".")[0]
    first = OF_SECTION.get(first, first)
    if first in head.inner:
        return Copies(head.inner[first].served ** 0.5, head.inner[first].served ** 0.5)
    section = head.sections[first]
    return Copies(section.rows / section.drawn, section.shared)


def _for_each(x: Array, sequences: int) -> Array:
    """(draws, ...) to (draws * sequences, ...), equal for all sequences of a draw."""
    wide = np.broadcast_to(np.expand_dims(x, 1), (len(x), sequences, *x.shape[1:]))
    return np.reshape(wide, (len(x) * sequences, *x.shape[1:]))


def on_lists(
    head: Head, names: list[str], own: list[str], fixed: Any, sequences: int
) -> Callable[..., Array]:
    """The head as a function of arrays in the order of `names` and `own`, sequence by sequence."""

    def run(*values: Array) -> Array:
        first, second = values[: len(names)], values[len(names) :]
        parameters = dict(zip(own, second, strict=True)) | fixed
        entering = dict(zip(names, first, strict=True))
        if sequences == 1:
            return head(entering, parameters)
        draws = len(next(iter(entering.values())))
        separated = {
            k: np.reshape(x, (draws * sequences, x.shape[1] // sequences, x.shape[2]))
            for k, x in entering.items()
        }
        repeated = {k: _for_each(x, sequences) for k, x in parameters.items()}
        result = head(separated, repeated)
        return np.reshape(result, (draws, result.shape[1] * sequences, result.shape[2]))

    return run


def of_overlaps(varies: Array, norms: Array) -> Array:
    """Y of `moments.engine.fluctuation` that gives the overlaps of different tokens these
    variances, in addition to the common fluctuation of the squared norms. For products, norms may
    fluctuate much more than overlaps of uncorrelated tokens.
    """
    own = np.maximum(2.0 * varies - norms, 0.0)
    np.fill_diagonal(own, 0.0)
    if not (total := own.sum()):
        return norms
    # y_kk y_ll = own_kl, solved by sums over rows
    result = np.maximum(norms, 0.0)
    np.fill_diagonal(result, (own.sum(-1) ** 2) / total)
    return result


def gram(x: Array) -> Array:
    """(L, L) sums over draws and features of (draws, L, features)."""
    flat = np.swapaxes(x, 0, 1).reshape(x.shape[1], -1)
    return (flat @ flat.T).astype(float)


def root_of(kernel: Array) -> Array:
    """Symmetric square root of a kernel."""
    if not np.all(np.isfinite(kernel)):
        raise DomainError(
            "moments at a mixer are no numbers: a token is zero, as padding inside a text is, and "
            "a norm divides by it; give norm_epsilon, or sequences of one length"
        )
    values, vectors = np.linalg.eigh(0.5 * (kernel + kernel.T))
    return (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T


@functools.lru_cache(maxsize=8)
def _own(head: Head, draws: int) -> dict[str, Array]:
    """Parameters of all draws; inner matrices have entries of variance 1."""
    random = np.random.default_rng(0)
    sizes = {name: (draws, m.fan_in, m.fan_out) for name, m in head.inner.items()}
    inner = {name: random.standard_normal(size) for name, size in sizes.items()}
    parameters = {**head.own(random, draws), **inner}
    return {name: values.astype(SINGLE) for name, values in parameters.items()}


@functools.lru_cache(maxsize=16)
def rows_of(draws: int, features: int, tokens: int, name: str) -> Array:
    """(draws, features, L) standard normal numbers from a stream per name; orthonormal over tokens
    if there are enough rows."""
    seed = [ord(letter) for letter in name]
    result = np.random.default_rng(seed).standard_normal((draws * features, tokens))
    if len(result) >= 2 * tokens:
        result = result @ np.linalg.inv(np.linalg.cholesky(result.T @ result / len(result))).T
    return result.astype(SINGLE).reshape(draws, features, tokens)
