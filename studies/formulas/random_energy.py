"""Attention over very many keys as a random energy model: spread out, or all but frozen.

n independent Gaussian logits of variance theta are the energies of Derrida's model (1981), and the
softmax is its Gibbs measure. As n grows at theta/log n fixed, sum a^2 tends to 0 up to
theta = 2 log n and to 1 - sqrt(2 log n/theta) beyond. Giorlandino and Goldt 2025 build a theory of
whole transformers on it; corrections are of the order 1/log n, which no real length makes small.
"""

from __future__ import annotations

from moments.formulas.checks import Interval
from moments.formulas.law import ComponentLaws, Source, asymptotic

GIORLANDINO = "Giorlandino and Goldt 2025, Two failure modes of deep transformers"
DERRIDA = "Derrida 1981, Random-energy model"
_NOTE = "the number of keys to infinity, the logit variance growing as its logarithm"

RANDOM_ENERGY = ComponentLaws(
    "random_energy",
    "Attention as a random energy model",
    {
        "critical_logit_variance": asymptotic(
            lambda m, seq_len: 2 * m.log(seq_len),
            Source(
                DERRIDA, "the freezing transition, at inverse temperature sqrt(2 log n / theta)"
            ),
            _NOTE,
        ),
        "row_square": asymptotic(
            lambda m, logit_scale, x_correlation, seq_len: (
                1 - m.sqrt(2 * m.log(seq_len) / (logit_scale * (1 - x_correlation)))
            ),
            Source(GIORLANDINO, "Y_2 = 1 - beta_c/beta beyond the transition, 0 before it"),
            limits={
                "logit_scale": Interval(0.0, open_lower=True),
                "x_correlation": Interval(-1.0, 1.0, open_upper=True),
            },
            note=_NOTE,
        ),
        "variance": asymptotic(
            lambda m, x_variance, x_correlation, row_square: (
                x_variance * (x_correlation + (1 - x_correlation) * row_square)
            ),
            Source(GIORLANDINO, "the update of q by attention: p + (q - p) Y_2"),
            _NOTE,
        ),
        "covariance": asymptotic(
            lambda m, x_variance, x_correlation: x_variance * x_correlation,
            Source(GIORLANDINO, "the update of p by attention: p stays"),
            f"{_NOTE}: two rows then never freeze on one key",
        ),
    },
)
