"""`compare_schemes`: every published scheme on one model, side by side."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DomainError, domain_error, unknown_name, without_warnings
from ..files import Shown, as_frame
from ..model.transformer import Transformer
from ..prediction.predict import predict
from ..prediction.result import Prediction
from ..scheme import Scheme
from ..scheme import schemes as every_scheme
from ..scheme.registry import input_options

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

COLUMNS = (
    "scheme",
    "norm",
    "variance_growth",
    "gradient_ratio",
    "final_correlation",
    "sensitivity",
)


@dataclass(frozen=True, eq=False)
class SchemeComparison(Shown):
    """Predictions of one model under several schemes.

    Attributes:
        model: the model; each scheme is applied at its authors' norm placement, if they state one.
        predictions: by name of the scheme.
        left_out: the reason why a scheme is missing, by its name.
    """

    model: Transformer
    predictions: Mapping[str, Prediction]
    left_out: Mapping[str, str]

    def to_frame(self) -> pd.DataFrame:
        """One row per scheme.

        Columns: scheme, norm, variance_growth (last over first), gradient_ratio (gradient variance
        at the first layer's input over that at the last layer's output), final_correlation and
        sensitivity (median over blocks of N sigma_block^2 / sigma_skip^2).
        """
        rows = [(name, *_numbers(result)) for name, result in self.predictions.items()]
        return as_frame(rows, columns=list(COLUMNS))

    def plot(self, name: str | None = None) -> Figure:
        """Variance, correlation and gradient along the depth, one row of panels per family, the
        model's `name` in the title; DomainError if no scheme could be applied."""
        from .plot import plot_schemes

        if not self.predictions:
            raise DomainError("nothing to draw: no scheme could be applied to the model")
        return plot_schemes(self, name)

    def __str__(self) -> str:
        shown = self.to_frame().to_string(index=False, float_format=lambda value: f"{value:.3g}")
        model = self.model
        head = (
            f"{len(self.predictions)} schemes at {model.layers} layers, d_model {model.d_model}, "
            "at initialisation, each at its authors' norm placement\n"
            "variance_growth: last layer over input; gradient_ratio: gradient variance at the\n"
            "input over that at the last layer; sensitivity: number of layers times the variance\n"
            "that a block adds over that of the skip connection, median over blocks"
        )
        missing = "".join(f"\nwithout {name}: {why}" for name, why in self.left_out.items())
        return f"{head}\n\n{shown}{missing}"

    def __repr__(self) -> str:
        without = f", without {', '.join(self.left_out)}" if self.left_out else ""
        names = ", ".join(self.predictions)
        return f"SchemeComparison({self.model.layers} layers: {names}{without})"


def _numbers(prediction: Prediction) -> tuple[str, float, float, float, float]:
    return (
        prediction.model.norm,
        float(prediction.variance[-1] / prediction.variance[0]),
        float(prediction.grad_variance[0] / prediction.grad_variance[-1]),
        float(prediction.correlation[-1]),
        float(np.median(block_sensitivity(prediction))),
    )


def block_sensitivity(prediction: Prediction) -> np.ndarray:
    """N sigma_block^2 / sigma_skip^2 of every residual sum in order, scales included, averaged over
    tokens and configurations. The block's part of a sum is the point before it in the trace times
    the branch scale; the rest is the skip connection.

    Source: Davis et al. 2021 in the form of Kedia et al. 4.6, who take its median, which the first
    blocks do not dominate.
    """
    scales, points = prediction.model.by_block("branch_scale"), prediction.trace.points
    ratios = []
    for block, total in itertools.pairwise(points):
        if total.site in ("attention.sum", "cross.sum", "ffn.sum"):
            square = scales[total.layer - 1, int(total.site == "ffn.sum")] ** 2
            added = square * np.mean(prediction.layout.moments(block)[1])
            ratios.append(added / (np.mean(prediction.layout.moments(total)[1]) - added))
    return np.array(ratios) * prediction.model.layers


def compare_schemes(
    model: Transformer,
    schemes: str | Sequence[str] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    step: Callable[[str], None] | None = None,
    **inputs: Any,
) -> SchemeComparison:
    """Apply schemes to a model, with their authors' options, and predict each.

    Args:
        model: shape, activation, dropout, embedding and head; its norm placement is kept unless a
            scheme requires another.
        schemes: one name or several; None: all.
        options: values other than the authors', for every one of these schemes that has them.
        step: called with the name of every scheme before it is predicted.
        inputs: what `predict` takes to describe input and gradient. Schemes whose constants depend
            on the input get its correlation too.

    Returns:
        A SchemeComparison; schemes that cannot be applied to the model are in `left_out`.

    Raises:
        DomainError: no such scheme, an option that none of them has, or one input for all that
            `predict` refuses.
    """
    if not isinstance(model, Transformer):
        raise domain_error("model", type(model).__name__, "a moments.Transformer")
    known = {scheme.name: scheme for scheme in every_scheme()}
    names = list(known) if schemes is None else [schemes] if isinstance(schemes, str) else schemes
    for name in names:
        if name not in known:
            raise unknown_name("scheme", name, known)
    for option in options or ():
        if not any(option in known[name].options for name in names):
            every = sorted({option for name in names for option in known[name].options})
            raise domain_error("option", option, f"one of {', '.join(every) or 'none: no options'}")
    predictions: dict[str, Prediction] = {}
    left_out: dict[str, str] = {}
    with without_warnings():
        for name in names:
            if step is not None:
                step(name)
            try:
                predictions[name] = predict(
                    scheme_model(model, known[name], inputs, options), **inputs
                )
            except DomainError as error:
                left_out[name] = str(error)
    return SchemeComparison(model, predictions, left_out)


def scheme_model(
    model: Transformer,
    scheme: Scheme,
    inputs: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
) -> Transformer:
    """The model with a scheme at its authors' placement, for an input as `predict` takes it;
    options that it does not have are left out."""
    if scheme.placements and model.norm not in scheme.placements:
        model = model.replace(
            norm=scheme.placements[0],
            post_layers=0,
            layernorm_scaling=model.layernorm_scaling if scheme.placements[0] != "none" else False,
        )
    given = {name: value for name, value in (options or {}).items() if name in scheme.options}
    return scheme.apply(model, **input_options(model, scheme, inputs) | given)
