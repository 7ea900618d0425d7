"""How much two tokens' overlap x_a.x_b/d varies over draws, beyond independent features.

Gaussian features have overlaps o of covariance

    Cov(o_ab, o_cd) = (C_ac C_bd + C_ad C_bc)/d.

One over d, little as it is, meets L^2 pairs of tokens where their mean, C_ab, is 0 beside L terms
C_aa: the gradients of queries and keys sum o_ab^2 over keys, and so gain L/d relative to that.
A network's features are not independent: it moves the overlaps it is given, and a residual sum adds
them up with their sign. Here the 1/d is followed as one number, the relative variance nu of the
overlap of what two tokens have of their own. With T the skip connection's and B the branch's own
variance of a token, and e the relative response of the branch's overlap to the stream's,

    linear map          nu + 1/width
    activation          e^2 (nu - 1/width) + 1/width
    dropout             (nu u^2 + (u'^2 - u^2)/width)/u'^2, own variance u before and u' after
    normalisation       nu: what the norms of two tokens do to C_ab is no overlap of their own
    attention           nu + 1/width of the values + e_q^2 (2/width + 1/(keys heads)); e = e_q + e_a
    residual sum        (nu T^2 + nu_b B^2 + 2 (e nu + 1/width) T B)/(T + B)^2

since the branch is turned at random, E (t_a.b_b)^2 = d T B. An activation's e is the slope of its
covariance law times own variance in over own variance out (Price). So is attention's e_q: rows
differ because their queries do, and two outputs' overlap moves with that of the tokens that ask by
what the query path sends back. In each head these differences pass through two matrices of d_head
columns and a sum over keys, whence the third term. Beside it e_a is as far as averages meet their
own tokens, of rows taken uniform. Left out: how features that two tokens share crowd activations
(up to 1/width more, for tokens all but equal). Three Post-LN layers of width 64 on 32 tokens have,
behind each block, nu = .0196, .0235, .0255, .0304, .0314, .0371 (standard error .0003); here .0193,
.0236, .0257, .0304, .0313, .0365, and without e_q .0162, .0208, .0202, .0252, .0246, .0301.

Tokens of fixed norm share a part whose size is one number a draw, and leave the rest to each: own
variance then varies as a whole (`own_spread`), and squared norms of query and key gradients, which
hold it twice, are its mean square.

nu is one number for all pairs of tokens. In six layers of width 128 on a text of 2 x 64 tokens,
overlaps vary by 1, 1.3, 1.6, 1.8, 2.0, 2.1 over d in GPT-2 (here 1, 1.4, 1.7, 1.9, 2.1, 2.3) and
by 1 to 2.8 in Llama at deviation .02 (2.6). There causal averages fill the stream, what tokens have
of their own lies in few directions whose sizes vary by more (up to 6/d), and squared query and key
norms stay 2 to 6 percent low (standard error 4 a layer); docs/real-modules.md has every family.

See docs/theory/norms.md, Overlaps of what tokens have of their own.
"""

from __future__ import annotations

from typing import NamedTuple

from ..engine.overlap import Overlap, OverlapWalk
from ..engine.state import Array
from ..engine.trace import Record, Trace, weight_rows
from .overlap_units import unit_growth, units


class Overlaps(NamedTuple):
    """Overlaps over a whole stack.

    Attributes:
        attended: nu of what every attention attends to, by its place.
        growth: factors on squared gradient norms, by layer and name.
        last: nu at the stack's output.
    """

    attended: dict[tuple[int, str], float]
    growth: dict[tuple[int, str], float]
    last: float

    def weights(self, trace: Trace) -> list[tuple[int, str, Array]]:
        """`Trace.weights`, of overlaps as they vary."""
        rows = weight_rows((one, self.attended.get(one.place)) for one in trace.weighted())
        return [
            (layer, name, norm * self.growth.get((layer, name), 1.0)) for layer, name, norm in rows
        ]


def stack_overlaps(stack: Record, memory: float | None = None) -> Overlaps:
    """Follow nu through the layers.

    Args:
        stack: the layers, both passes, one configuration.
        memory: nu of what cross-attention reads; None: 1/width of that.
    """
    walk = OverlapWalk(memory)
    last = walk.through(stack, Overlap(1.0 / stack.input.width))
    for chain, before in walk.chains:
        for unit in units(chain):
            entering = before[unit.first].variance
            for name, factor in unit_growth(unit, entering).items():
                walk.growth[chain.layer, name] = factor
    return Overlaps(walk.attended, walk.growth, last.variance)
