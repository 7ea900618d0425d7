"""Recurrent mixers and short convolutions as components, and the blocks made of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from ...engine.composition import Chain, Component, Leaf, Parallel, PullbackResult
from ...engine.fluctuation import overlap_variance
from ...engine.layout import Padding
from ...engine.response import Elementwise, GradientUnits, Response
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
"""Sampled heads for the band, which needs three evaluations in every layer."""

BIAS_REMEDY = "its laws know no biases of other variance: declare them as 0"


class Inward(NamedTuple):
    """An input matrix: its numbers of inputs and outputs, the variance of its entries times the
    squared factor on its outputs, and that squared factor."""

    name: str
    fan_in: int
    rows: int
    variance: float
    square: float


@dataclass(frozen=True)
class Mixer(Leaf):
    """A mixer without its output projection, token by token.

    Attributes:
        inward: all matrices but that of the output.
        padding: as in `SelfAttention`; several documents or padding are refused.
        sequences: number of equally long sequences concatenated in a kernel.
        draws: number of sampled heads, for heads without a closed law; None: by their size.
        named: names of the parameters in the table of weight gradients.
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
        """The law of one kernel: in closed form if there is one, else by sampled heads."""
        block, count = self.block, self.sequences
        gains = {matrix.name: matrix.fan_in * matrix.variance for matrix in self.inward}
        if isinstance(block, ShortConvolution):
            return GatedConvolution(block, self.width, kernel, gains, count, varies)
        if isinstance(block, LinearAttention) and LinearHeads.covers(block):
            return LinearHeads(block, kernel, gains, count, varies)
        return DrawnHeads(HEADS[type(block)](block), kernel, gains, count, self.draws)

    def forward(self, signal: Signal) -> tuple[Signal, _Pullback]:
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
        both = (x.reshape(-1, *shape[-2:]) for x in (tokens.off_diagonal, varies))
        laws = [self._law(*matrices) for matrices in zip(*both, strict=True)]
        kernel = Kernel.of_matrix(np.stack([law.forward() for law in laws]).reshape(shape))
        fluctuation = None
        if signal.fluctuation is not None:
            norms, overlaps = (
                Kernel.of_matrix(np.stack([getattr(law, name) for law in laws]).reshape(shape))
                for name in ("norms", "overlaps")
            )
            zero = norms.scaled(0.0)
            if signal.fluctuation.overlaps is None:
                fluctuation = Fluctuation(norms)
            else:
                fluctuation = Fluctuation(norms, overlaps, shared=(zero, zero))
        notes = tuple(dict.fromkeys(note for law in laws for note in getattr(law, "notes", ())))
        output = Signal(
            kernel,
            signal.seq_len,
            0.0 * kernel.diagonal,
            self.width,
            fluctuation=fluctuation,
            notes=notes,
        )
        return output, _Pullback(self, tokens, laws)

    def response(self, record: Record, around: GradientUnits) -> Response:
        # Derivatives are taken as entrywise: all pairs of tokens are changed at once.
        few = replace(self, draws=BAND_DRAWS)
        grad_out, grad_in = around.grad_out(record), record.grad_out
        return Elementwise.of(few.forward, record.input, grad_in, grad_out)


@dataclass(slots=True, eq=False)
class _Pullback:
    """Backward pass through a mixer."""

    leaf: Mixer
    tokens: Kernel
    laws: list[Any]

    def __call__(self, gradient: Gradient) -> PullbackResult:
        leaf, shape = self.leaf, np.shape(self.tokens.off_diagonal)
        grad_out = np.broadcast_to(gradient.kernel.off_diagonal, shape).reshape(-1, *shape[-2:])
        known = (
            np.broadcast_to(x, shape[:-1]).reshape(-1, shape[-1])
            for x in (gradient.norm_response, gradient.radial)
        )
        backs = [law.backward(*x) for *x, law in zip(grad_out, *known, self.laws, strict=True)]
        grad_in = [
            sum(
                back.kernels[matrix.name] * (matrix.rows * matrix.variance)
                for matrix in leaf.inward
                if matrix.name in back.kernels
            )
            for back in backs
        ]
        kernel = Kernel.of_matrix(np.stack(grad_in).reshape(shape))
        weights = functools.partial(self._weights, backs)
        return PullbackResult(gradient.with_kernel(kernel), weights)

    def _weights(self, backs: list[Back]) -> Mapping[str, Array]:
        # dW = sum_t dp_t x_t^T: E|dW|^2 = d_model rows sum_tt' E dp_t dp_t' E x_t x_t'
        leaf, pairs = self.leaf, self.tokens.off_diagonal
        shape = np.shape(pairs)[:-2]
        flat = pairs.reshape(-1, *np.shape(pairs)[-2:])
        norms: dict[str, list[float]] = {}
        for back, tokens in zip(backs, flat, strict=True):
            sizes = {
                m.name: m.fan_in * m.rows * float((back.kernels[m.name] * tokens).sum())
                for m in leaf.inward
                if m.name in back.kernels
            } | back.own
            squares = {matrix.name: matrix.square for matrix in leaf.inward}
            for name, size in sizes.items():
                norms.setdefault(leaf.named(name), []).append(size * squares.get(name, 1.0))
        return {name: np.array(sizes).reshape(shape)[()] for name, sizes in norms.items()}


def recurrent_parts(
    parts: Blocks, block: Block, site: str = "attention", named: Callable[[str], str] = str
) -> tuple[Component, ...]:
    """A mixer and its output projection.

    Args:
        site: prefix of the sites' names.
        named: full names of the matrices.
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
    """The sum of attention and another mixer, each times its scale."""
    blocks = replace(parts, model=parts.model.replace(mixer=None))
    *attention, _ = blocks.attention().components  # dropout is applied to the sum
    mixer = recurrent_parts(parts, block.mixer, "mixer", block.named)
    both = []
    for branch, amplitude in ((attention, block.attention_scale), (mixer, block.mixer_scale)):
        scaled = Scale(SCALE, parts.theory, "", {"weight_variance": amplitude**2})
        both.append(Chain((*branch, scaled)))
    return (Parallel(tuple(both)),)
