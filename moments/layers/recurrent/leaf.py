"""A recurrent mixer or short convolution as a component, and its blocks put together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from ...engine.composition import Chain, Component, Leaf, Parallel, Pulled
from ...engine.fluctuation import overlap_variance
from ...engine.layout import Padding
from ...engine.response import Around, Elementwise, Response
from ...engine.state import Array, Fluctuation, Gradient, Kernel, Signal
from ...engine.trace import Record
from ...errors import DomainError
from ...formulas.linear import SCALE
from ...model.block import Block
from ...model.mixers import LinearAttention, ParallelMixer, ShortConvolution
from ..elementary import Scale
from .drawn import Back, DrawnHeads
from .exact import GatedConvolution, LinearHeads
from .mixers import HEADS

if TYPE_CHECKING:
    from ..architecture import Blocks

BAND_DRAWS = 16
"""Draws of heads for the band of one draw, which asks for them three times in every layer."""

BIAS_REMEDY = "its laws know no biases of other variance: declare them as 0"


class Inward(NamedTuple):
    """A matrix: features that it reads and makes, the variance of its entries times the square of
    what multiplies those made, and that square."""

    name: str
    fan_in: int
    rows: int
    variance: float
    square: float


@dataclass(frozen=True)
class Mixer(Leaf):
    """Everything of a mixer up to its output projection, by token.

    Attributes:
        inward: every matrix but that of the output.
        padding: as of `SelfAttention`; of several documents, or with padding, none is covered.
        sequences: equally long ones that a kernel of tokens holds one after the other.
        draws: of heads, where they are drawn; None: as many as their size allows.
        named: what its parameters are called in the table of weight gradients.
    """

    label: str
    block: Block
    d_model: int
    inward: tuple[Inward, ...]
    width: int
    padding: Padding | None = None
    sequences: int = 1
    draws: int | None = None
    named: Callable[[str], str] = str

    mixes_tokens: ClassVar[bool] = True

    def _law(self, kernel: Array, varies: Array = 0.0) -> Any:
        block, many = self.block, self.sequences
        gains = {one.name: one.fan_in * one.variance for one in self.inward}
        if isinstance(block, ShortConvolution):
            return GatedConvolution(block, self.width, kernel, gains, many, varies)
        if isinstance(block, LinearAttention) and LinearHeads.covers(block):
            return LinearHeads(block, kernel, gains, many, varies)
        return DrawnHeads(HEADS[type(block)](block), kernel, gains, many, self.draws)

    def forward(self, signal: Signal) -> tuple[Signal, _Way]:
        if signal.resolved is not True:
            raise DomainError(
                f"{self.block.kind}: its laws hold token by token; pass tokens=True, and at most "
                "512 of them"
            )
        if self.padding is not None and not np.all(np.asarray(self.padding) == 1):
            raise DomainError(
                f"{self.block.kind}: padded sequences and packed documents are not covered, as "
                "its state runs on through them; predict sequences of one length"
            )
        tokens = signal.second_moment()
        shape = np.shape(tokens.off_diagonal)
        varies = overlap_variance(signal)
        varies = np.zeros(shape) if varies is None else np.broadcast_to(varies, shape)
        both = (one.reshape(-1, *shape[-2:]) for one in (tokens.off_diagonal, varies))
        laws = [self._law(*one) for one in zip(*both, strict=True)]
        kernel = Kernel.of_matrix(np.stack([one.forward() for one in laws]).reshape(shape))
        fluctuation = None
        if signal.fluctuation is not None:
            norms, overlaps = (
                Kernel.of_matrix(np.stack([getattr(one, of) for one in laws]).reshape(shape))
                for of in ("norms", "overlaps")
            )
            none = norms.scaled(0.0)
            if signal.fluctuation.overlaps is None:
                fluctuation = Fluctuation(norms)
            else:
                fluctuation = Fluctuation(norms, overlaps, shared=(none, none))
        notes = tuple(dict.fromkeys(note for one in laws for note in getattr(one, "notes", ())))
        output = Signal(
            kernel,
            signal.seq_len,
            0.0 * kernel.diagonal,
            self.width,
            fluctuation=fluctuation,
            notes=notes,
        )
        return output, _Way(self, tokens, laws)

    def response(self, record: Record, around: Around) -> Response:
        # Pairs of tokens are moved together, each answering for itself.
        few = replace(self, draws=BAND_DRAWS)
        grad_out, grad_in = around.grad_out(record), record.grad_out
        return Elementwise.of(few.forward, record.input, grad_in, grad_out)


@dataclass(slots=True, eq=False)
class _Way:
    """The way back through a mixer."""

    leaf: Mixer
    tokens: Kernel
    laws: list[Any]

    def __call__(self, gradient: Gradient) -> Pulled:
        leaf, shape = self.leaf, np.shape(self.tokens.off_diagonal)
        grad_out = np.broadcast_to(gradient.kernel.off_diagonal, shape).reshape(-1, *shape[-2:])
        known = (
            np.broadcast_to(one, shape[:-1]).reshape(-1, shape[-1])
            for one in (gradient.norm_response, gradient.radial)
        )
        backs = [law.backward(*of) for *of, law in zip(grad_out, *known, self.laws, strict=True)]
        grad_in = [
            sum(
                one.kernels[of.name] * (of.rows * of.variance)
                for of in leaf.inward
                if of.name in one.kernels
            )
            for one in backs
        ]
        kernel = Kernel.of_matrix(np.stack(grad_in).reshape(shape))
        weights = functools.partial(self._weights, backs)
        return Pulled(gradient.with_kernel(kernel), weights)

    def _weights(self, backs: list[Back]) -> Mapping[str, Array]:
        # dW = sum_t dp_t x_t^T: E|dW|^2 = d_model rows sum_tt' E dp_t dp_t' E x_t x_t'
        leaf, pairs = self.leaf, self.tokens.off_diagonal
        shape = np.shape(pairs)[:-2]
        flat = pairs.reshape(-1, *np.shape(pairs)[-2:])
        norms: dict[str, list[float]] = {}
        for back, tokens in zip(backs, flat, strict=True):
            sizes = {
                of.name: of.fan_in * of.rows * float((back.kernels[of.name] * tokens).sum())
                for of in leaf.inward
                if of.name in back.kernels
            } | back.own
            squares = {of.name: of.square for of in leaf.inward}
            for name, size in sizes.items():
                norms.setdefault(leaf.named(name), []).append(size * squares.get(name, 1.0))
        return {name: np.array(sizes).reshape(shape)[()] for name, sizes in norms.items()}


def recurrent_parts(
    parts: Blocks, block: Block, site: str = "attention", named: Callable[[str], str] = str
) -> tuple[Component, ...]:
    """A mixer and its output projection.

    Args:
        site: begins the names of their sites.
        named: what its matrices are called.
    """
    model = parts.model
    shapes, variances = block.shapes(model), model.variances_of(parts.number)
    biases, factors = parts._biases, getattr(block, "factors", {})
    for name in shapes:
        if biases.get(named(name), 0.0) != 0.0:
            raise DomainError(f"biases.{name} with a {block.kind}: {BIAS_REMEDY}")
    width, _ = shapes["output"]
    inward = tuple(
        Inward(name, *shape, float(variances[named(name)]) * square, square)
        for name, shape in shapes.items()
        if name != "output"
        for square in (factors.get(name, 1.0) ** 2,)
    )
    mixer = Mixer(
        f"{site}.heads",
        block,
        model.d_model,
        inward,
        width,
        parts.padding,
        parts.sequences,
        named=named,
    )
    projection = parts._linear(f"{site}.projection", named("output"), width, model.d_model)
    return mixer, projection


def parallel_parts(parts: Blocks, block: ParallelMixer) -> tuple[Component, ...]:
    """Attention and another mixer, each times its scale, added."""
    alone = replace(parts, model=parts.model.replace(mixer=None))
    *attention, _ = alone.attention().components  # without dropout, which is of the sum
    mixer = recurrent_parts(parts, block.mixer, "mixer", block.named)
    both = []
    for branch, amplitude in ((attention, block.attention_scale), (mixer, block.mixer_scale)):
        scaled = Scale(SCALE, parts.theory, "", {"weight_variance": amplitude**2})
        both.append(Chain((*branch, scaled)))
    return (Parallel(tuple(both)),)
