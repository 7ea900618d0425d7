"""A learned addition to attention's residual sum (`moments.Laurel`).

    y = s (x + A(n) + n + L(n)),  n = N(x),  L(n) = N'(W_u W_d n).

n is along x, so x + n = (1 + 1/|x|) x with |x| the token's root mean square, and the norm of that
is n again: the sum is a rescaling of the tokens, and then an ordinary residual sum whose branch is
A + L. See docs/theory/streams.md, Laurel.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.bottom_to_top import at_both
from ..engine.composition import Chain, Component, Leaf, Parallel, Pullback, PullbackResult
from ..engine.state import Array, Gradient, Signal, ratio_or_zero
from ..engine.trace import Record, Run
from ..formulas.linear import LINEAR
from ..model.transformer import Transformer
from .elementary import Linear


@dataclass(frozen=True)
class AddNormalized(Leaf):
    """x + N(x), an RMSNorm with this epsilon."""

    label: str
    epsilon: float

    rescales = True

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        size = np.sqrt(signal.kernel.diagonal + self.epsilon)
        grown, fluctuation, centred = 1.0 + 1.0 / size, signal.fluctuation, signal.centred
        if fluctuation is not None:
            # d|x + n|^2 = (1 + 1/|x|) d|x|^2, as |n| is fixed; directions are those of x
            norms = at_both(fluctuation.norms, grown)
            overlaps = fluctuation.overlaps and at_both(fluctuation.overlaps, grown * grown)
            fluctuation = fluctuation._replace(norms=norms, overlaps=overlaps, free_norms=None)
        output = signal.replace(
            kernel=at_both(signal.kernel, grown),
            fluctuation=fluctuation,
            centred=None if centred is None else at_both(centred, grown),
        )
        return output, functools.partial(self._back, signal, size)

    def _back(self, signal: Signal, size: Array, gradient: Gradient) -> PullbackResult:
        """Across x the gradient grows by h = 1 + 1/|x|, along x by 1.

        h fluctuates with |x|^2, as the gradient does by its `norm_response`: with c = 1/(|x| + 1),
        |x|^2 h' = -c h/2 and |x|^4 h'' = 3 c h/4.
        """
        kernel, grown, c = gradient.kernel, 1.0 + 1.0 / size, 1.0 / (size + 1.0)
        response = gradient.norm_response
        if signal.fluctuation is not None:
            tokens = signal.kernel
            spread = at_both(signal.fluctuation.norms, ratio_or_zero(1.0, tokens.diagonal))
            own = spread.diagonal * c * (1.5 + response) / 4
            (c_i, c_j), (e_i, e_j), (own_i, own_j) = (
                tokens.over_tokens(one + 0.0 * tokens.diagonal) for one in (c, response, own)
            )
            pairs = spread.off_diagonal * (c_i * c_j + c_i * e_j + c_j * e_i) / 4 + own_i + own_j
            single = spread.diagonal * c * (c + 2.0 * response) / 4 + 2.0 * own
            kernel = kernel.weighted(1.0 + single, 1.0 + pairs)
        grad_in = Gradient(
            at_both(kernel, grown),
            gradient.seq_len,
            radial=gradient.radial / (grown * grown),
            centred_share=gradient.centred_share,
            norm_response=(response * size + 1.0) / (size + 1.0),
        )
        return PullbackResult(grad_in)


@dataclass(frozen=True)
class LaurelSum(Chain):
    """`AddNormalized` and the residual sum, which have the norm's gain in common: the gradients
    through both are independent."""

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        done = super().backpropagate(record, gradient, run)
        (branch,) = done.children[1].children
        norm = branch.in_order()[0]
        kept = gradient.kernel.scaled(done.children[1].component.skip_scale ** 2)
        direct = norm.input.width * (norm.output.kernel * kept).total(gradient.seq_len)
        through = norm.pulled.weights

        def weights() -> dict[str, Array]:
            return {name: value + direct for name, value in through().items()}

        norm.pulled = dataclasses.replace(norm.pulled, weights=weights)
        return done


def branch(model: Transformer, attention: Component, norm: Component) -> Parallel:
    """A + L, with A the block's component behind its norm and `norm` that of L."""
    declared = model.laurel
    assert declared is not None

    def linear(name: str) -> Linear:
        fan_in, fan_out = declared.shapes(model.d_model)[name]
        parameters: dict[str, Any] = {"fan_in": fan_in, "fan_out": fan_out}
        parameters["weight_variance"] = declared.variances[name]
        site = f"attention.{name}"
        return Linear(LINEAR, "refined", site, parameters, fan_out, name)

    return Parallel((attention, Chain((linear("laurel_down"), linear("laurel_up"), norm))))


def laurel_sum(model: Transformer, residual: Component) -> LaurelSum:
    """The sum, whose residual connection has `branch` behind a norm as its branch."""
    return LaurelSum((AddNormalized("attention.laurel", model.norm_epsilon), residual))
