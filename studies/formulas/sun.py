"""Sun et al.'s variance and Jacobian laws for Pre-LN and for LayerNorm Scaling.

sigma is the stream's deviation. Their variance recursions hold where a block's output correlates
with the stream, as training makes it; `branch_variance` and the uncorrelated laws say what
initialisation gives instead. Where the paper's proof slips, the right form is the law and the
printed one is kept under a name that ends in `_printed`.
"""

from __future__ import annotations

from typing import Any

from moments.formulas.checks import POSITIVE
from moments.formulas.law import ComponentLaws, Law, Source, Substituted, asymptotic, derived
from moments.formulas.references import SUN


def _sun(place: str) -> Source:
    return Source(SUN, place)


def _attention_reach(m: Any, seq_len: Any) -> Any:
    return m.sqrt(seq_len) + 2 + 1 / m.sqrt(seq_len)


def _attention_linear(
    m: Any, weight_variance: Any, inner: Any, d_model: Any, d_head: Any, heads: Any, seq_len: Any
) -> Any:
    """Coefficient of 1/sigma in equation 36's attention factor, `inner` a weight variance too."""
    width = inner * d_model * m.sqrt(d_head) + 1 + m.sqrt(d_head / d_model)
    return 2 * d_model * heads * _attention_reach(m, seq_len) * weight_variance * width


def _ffn_linear(m: Any, weight_variance: Any, d_model: Any, d_ff: Any) -> Any:
    """The same of the feed-forward block's factor."""
    return weight_variance * (m.sqrt(d_model) + m.sqrt(d_ff)) ** 2


_LINEAR: dict[str, Any] = {
    "of_ffn": _ffn_linear,
    "of_attention": Substituted(_attention_linear, inner="weight_variance"),
}


def _prefactor(
    m: Any,
    weight_variance: Any,
    x_variance: Any,
    d_model: Any,
    d_head: Any,
    heads: Any,
    seq_len: Any,
) -> Any:
    deviation, weight = m.sqrt(x_variance), m.sqrt(weight_variance)
    output = weight * (m.sqrt(d_model) + m.sqrt(heads * d_head))
    logits = _attention_reach(m, seq_len) * weight**3 * m.sqrt(d_model**3 * d_head)
    values = deviation * (m.sqrt(d_model) + m.sqrt(d_head))
    return x_variance * output * heads * (logits + values)


CURSE_OF_DEPTH = ComponentLaws(
    "curse_of_depth",
    "Variance and Jacobian of a Pre-LN stack, with and without LayerNorm Scaling",
    {
        "variance": asymptotic(
            lambda m, x_variance: x_variance * (1 + 1 / m.sqrt(x_variance)),
            _sun("Lemma 3.2, one layer, constants set to 1"),
            "orders of growth only; needs branches correlated with the stream",
        ),
        "lns_variance": asymptotic(
            lambda m, x_variance, layer: x_variance * (1 + 1 / m.sqrt(layer * x_variance)),
            _sun("Lemma 4.1, one layer, constants set to 1"),
            "orders of growth only; needs branches correlated with the stream",
        ),
        "variance_after": asymptotic(
            lambda m, layer: layer**2 / 4,
            derived("Lemma 3.2's recursion as d sigma / d layer = 1/2"),
            "many layers",
        ),
        "lns_variance_after": asymptotic(
            lambda m, layer: layer,
            derived("Lemma 4.1's recursion as d sigma / d layer = layer^(-1/2) / 2"),
            "many layers",
        ),
        "initial_variance_after": Law(
            lambda m, x_variance, branch_variance, layer: x_variance + branch_variance * layer,
            derived("independent branches of equal variance"),
        ),
        "lns_initial_variance_after": Law(
            lambda m, x_variance, branch_variance, layer: (
                x_variance + branch_variance * m.harmonic(layer, 1)
            ),
            derived("independent branches whose variance LayerNorm Scaling divides by the layer"),
            note="logarithmic: Lemma 4.1's linear lower bound needs correlated branches",
        ),
        "jacobian_linear": Law(
            Substituted(lambda m, of_ffn, of_attention: of_ffn + of_attention, **_LINEAR),
            _sun("equation 36 multiplied out, its first factor as equation 40 has it"),
        ),
        "jacobian_linear_printed": Law(
            lambda m, weight_variance, d_model, d_ff, d_head, heads, seq_len: (
                weight_variance / _ffn_linear(m, 1, d_model, d_ff)
                + _attention_linear(m, weight_variance, 1, d_model, d_head, heads, seq_len)
            ),
            _sun("equation 47"),
            note="the first term's denominator belongs in its numerator (equation 40), and a "
            "weight variance of equation 36 is lost in the second",
        ),
        "jacobian_quadratic": Law(
            Substituted(lambda m, of_ffn, of_attention: of_ffn * of_attention, **_LINEAR),
            _sun("equation 36 multiplied out, its first factor as equation 40 has it"),
        ),
        "jacobian_quadratic_printed": Law(
            lambda m, weight_variance, d_model, d_head, heads, seq_len: (
                2
                * (d_model * weight_variance) ** 2
                * heads
                * _attention_reach(m, seq_len)
                * m.sqrt(d_head)
            ),
            _sun("equation 48"),
            note="not the product of equation 36's two terms",
        ),
        "jacobian_factor": Law(
            lambda m, x_variance, jacobian_linear, jacobian_quadratic: (
                1 + jacobian_linear / m.sqrt(x_variance) + jacobian_quadratic / x_variance
            ),
            _sun("Theorem 3.3, one layer"),
        ),
        "lns_jacobian_factor": Law(
            lambda m, x_variance, layer, jacobian_linear, jacobian_quadratic: (
                1
                + jacobian_linear / m.sqrt(layer * x_variance)
                + jacobian_quadratic / (layer * x_variance)
            ),
            derived("Theorem 4.2 with the factor 1/sqrt(layer) of equation 59's first line"),
        ),
        "lns_jacobian_factor_printed": Law(
            lambda m, x_variance, layer, jacobian_linear, jacobian_quadratic: (
                1
                + jacobian_linear / (layer * m.sqrt(x_variance))
                + jacobian_quadratic / (layer**2 * x_variance)
            ),
            _sun("Theorem 4.2, one layer"),
            note="1/layer stands where the scaled norm gives 1/sqrt(layer)",
        ),
        "jacobian_growth": asymptotic(
            lambda m, jacobian_linear, layers: m.exp(2 * jacobian_linear * m.sqrt(layers)),
            derived("Theorem 3.3 at variance = layer: the sum of A/sqrt(layer)"),
            "many layers, up to a power of their number; the theorem prints Theta(L)",
        ),
        "query_prefactor": Law(
            _prefactor, _sun("Theorem 4.3, equations 79 and 80"), limits={"x_variance": POSITIVE}
        ),
    },
)
