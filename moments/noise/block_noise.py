"""What one draw of a block's matrices adds at random.

Tokens alike have two kinds of modes: the token mean, with eigenvalue v + (L - 1) c, and L - 1
differences with eigenvalue v - c. A Gaussian matrix onto w features makes the realised eigenvalue
of each fluctuate by 2/w of its square.

See docs/theory/band.md, What fluctuates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..engine.modes import Modes
from ..engine.response import last_matrix
from ..engine.sensitivity import ratio
from ..engine.state import Array, Kernel
from ..engine.trace import Record
from ..transfer.attention.logits import logit_law
from ..transfer.attention.softmax import SquareTable
from ..transfer.attention.softmax.chebyshev import THETA_MAX


class Addition(NamedTuple):
    """What the addition of a branch, or of several, adds at random; nothing where a part has none.

    Attributes:
        carried, added: (..., 2) modes of the skip connection and of the branch.
        alone: (..., 2) own variance of each mode.
        coherent: (..., 2, 2) covariance that modes of a kind share, and so does their average.
        kept: (...,) factor of the skip connection on a kernel.
        gain: (..., 2, 2) factor of the branch on the overlap of two different modes: of the means
            of two sequences, of a mean and a difference, of two differences.
        kappa: (...,) d_model times the relative variance of |branch|^2.
    """

    carried: Array
    added: Array
    alone: Array
    coherent: Array
    kept: Array
    gain: Array
    kappa: Array


def addition(
    carried: Array, added: Array, kept: Array, gain: Array, kappa: Array, width: Array
) -> Addition:
    """Modes that fluctuate one by one: carried and added are independent in direction."""
    alone = (4 * carried + kappa[..., None] * added) * added / width
    return Addition(carried, added, alone, 0.0 * gain, kept, gain, kappa)


def one_after_the_other(additions: Sequence[Addition], modes: Modes) -> Addition:
    """Of parallel branches, each of which finds what those before it have left.

    Two branches are independent in direction, so that |B + B'|^2 varies by 4 B B'/d beside what
    each does.
    """
    first = additions[0]
    if len(additions) == 1:
        return first
    sizes = [one.added @ modes.average for one in additions]
    total = np.add.reduce(sizes)
    # (sum B)^2 - sum B^2 is twice the sum over pairs
    own = sum((one.kappa - 2) * size**2 for one, size in zip(additions, sizes, strict=True))
    return first._replace(
        added=sum(one.added for one in additions),
        alone=sum(one.alone for one in additions),
        coherent=sum(one.coherent for one in additions),
        gain=sum(one.gain for one in additions),
        kappa=2 + ratio(own, total**2),
    )


def attention_addition(
    attention: Any,
    plain: Addition,
    returned: Array,
    received: Array,
    tokens: Kernel,
    modes: Modes,
) -> Addition:
    """Noise of the gradient that attention sends back, where modes do not fluctuate one by one.

    The output projection's noise, 2 over its fan-in for each mode received, is passed on by every
    path. The token mean that comes back is Gaussian through the value projection, 2/d. What the
    mean sends into the differences (through the keys, and by how often a token is attended to) is
    in each head one vector over tokens, J X W_v u: its squared norm has as many degrees of freedom
    as the keys and features that a^2 sees, and heads average.

    Args:
        attention: the block's attention.
        plain: the noise if every mode fluctuated by itself.
        returned: (..., 2, 2) what the branch does to the gradient's modes.
        received: (..., 2) the gradient's modes at the block's output.
        tokens: kernel of the tokens that attend.
        modes: of the tokens.
    """
    inner, width = attention.heads * attention.d_head, attention.d_model
    stage = returned * (2 / inner * received**2 / modes.count)[..., None, :]
    direct = np.stack([plain.added[..., 0], returned[..., 1, 1] * received[..., 1]], axis=-1)
    alone = (4 * plain.carried * plain.added + 2 * direct**2) / width
    # a_j^2 over its sum is the softmax of the doubled logits (no further than the table goes)
    law = logit_law(attention, tokens, tokens, (width, width))
    own = law.keys.kernel.diagonal - law.keys.kernel.pairs
    theta = np.clip(4 * law.scale * law.queries.kernel.diagonal * own, 0.0, THETA_MAX)
    squares = SquareTable.load().at_length(modes.seq_len).single(theta).sum_square
    share = 2 / attention.heads * (squares + 1 / width)
    coherent = stage @ np.swapaxes(returned, -1, -2)
    coherent[..., 1, 1] += share * (returned[..., 1, 0] * received[..., 0]) ** 2
    return plain._replace(alone=alone, coherent=coherent)


def logit_variance(attention: Any, base: Array, received: Array, modes: Modes) -> Array:
    """Relative variance of |W_k^T W_q x|^2, averaged over heads, and over tokens as gradients do.

    The paths through the logits hold G_ik x_i^T W_q W_k W_k^T W_q^T x_k summed over i, k, a
    quadratic form with one eigenvalue per mode, the product of the signal's and the gradient's.
    """
    weight = base * received
    alike = ratio((weight**2 * modes.count).sum(-1), (weight * modes.count).sum(-1) ** 2)
    return alike * 2 * (1 / attention.d_head + 1 / attention.d_model) / attention.heads


def attending(branch: Record) -> Kernel:
    """Kernel of the tokens that reach the attention in a branch, unchanged moments."""
    leaf = next(one for one in branch.leaves() if one.component.self_attention is not None)
    kernel = leaf.input.kernel
    variance, pairs = kernel.diagonal[0], kernel.pairs[0]
    if leaf.component.normalises:  # its tokens are those of unit norm
        return Kernel(1.0 + 0.0 * variance, ratio(pairs, variance))
    return Kernel(variance, pairs)


def own_fluctuation(branch: Record) -> Array:
    """Relative variance of |branch|^2 that its own matrices add, the same in both directions.

    A Gaussian matrix onto w features adds 2/w; an activation makes it (kurtosis - 1)/w. Backward
    the kurtosis is that of slope times Gaussian, equal for functions of degree 1 (at unit variance
    6.3 against 7.2 forward for GELU). Dropout's masks are fresh for every token and average out.
    """
    reached = last_matrix(tuple(branch.leaves())).output
    assert reached.spread is not None
    moment = reached.second_moment().diagonal
    relative = ratio(reached.spread.diagonal, moment**2)
    return relative[0]
