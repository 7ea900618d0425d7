"""The papers' statements about whole networks, as laws, and the symbols that only these contain."""

from moments.formulas.checks import COUNT, NONNEGATIVE, REAL, Interval
from moments.formulas.symbols import declare

declare(
    (
        ("logit_scale", r"\Theta", "logit variance of a row divided by 1 - r", NONNEGATIVE),
        (
            "row_square",
            r"P_2",
            "E sum_j a_ij^2 over one attention row",
            Interval(0.0, 1.0, open_lower=True),
        ),
        ("layers", r"N", "layers of the stack", COUNT),
        ("layer", r"\ell", "number of a layer, counted from 1", COUNT),
        (
            "attention_gain",
            r"C_1",
            "attention block's variance at unit variance, r = 1",
            NONNEGATIVE,
        ),
        ("ffn_gain", r"C_2", "feed-forward block's variance at unit variance", NONNEGATIVE),
        ("branch_constant", r"k", "constant of beta^2 = k / N^alpha", NONNEGATIVE),
        ("branch_exponent", r"\alpha", "exponent of beta^2 = k / N^alpha", REAL),
        (
            "gradient_ratio",
            r"C_6",
            "token correlation of the gradient over the signal's",
            NONNEGATIVE,
        ),
        ("attention_branch_square", r"\alpha_1^2", "square of the attention's scale", NONNEGATIVE),
        (
            "ffn_branch_square",
            r"\alpha_2^2",
            "square of the feed-forward block's scale",
            NONNEGATIVE,
        ),
        (
            "attention_depth_constant",
            r"\tilde\alpha_1",
            "number of layers times the attention's squared scale",
            NONNEGATIVE,
        ),
        (
            "ffn_depth_constant",
            r"\tilde\alpha_2",
            "number of layers times the feed-forward block's squared scale",
            NONNEGATIVE,
        ),
        (
            "gram_square",
            r"\|X^\top L X\|^2",
            "squared norm of the centred Gram matrix",
            NONNEGATIVE,
        ),
        (
            "gram_trace",
            r"\mathrm{tr}\,X^\top L X",
            "tokens' squared distance to the mean",
            NONNEGATIVE,
        ),
        ("token_square", r"\|X\|^2", "squared norm of all tokens", NONNEGATIVE),
        (
            "jacobian_linear",
            r"A",
            "coefficient of 1/sigma in a layer's Jacobian bound",
            NONNEGATIVE,
        ),
        ("jacobian_quadratic", r"B", "coefficient of 1/sigma^2 in a layer's bound", NONNEGATIVE),
    )
)
