"""Squared gradient norms of parameters, predicted beside measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..prediction.measurement import Measurement
from ..prediction.result import Prediction

if TYPE_CHECKING:
    import pandas as pd

_SIMULATED = "the simulated declaration"


def per_sequence(prediction: Prediction, measurement: Measurement) -> int:
    """Sequences over which a predicted norm is to be summed to be the measured one.

    A white gradient injected into a real module is independent from sequence to sequence, and its
    weight gradients are those of the whole batch; a simulation divides them by it.
    """
    alone = prediction.layout.sequences == 1 and prediction.loss is None
    whole = measurement.loss is None and measurement.source != _SIMULATED
    return measurement.batch if alone and whole else 1


def side_by_side(prediction: Prediction, measurement: Measurement) -> pd.DataFrame:
    """One row per parameter's role that both know.

    Columns: layer, weight, predicted, measured, stderr (nan from one draw), error (relative).
    """
    import pandas as pd

    keys = ["layer", "weight"]
    first = prediction.weight_gradients().groupby(keys, as_index=False)["squared_norm"].sum()
    rows = measurement.weight_gradients()
    rows["square"] = rows["squared_norm_stderr"].astype(float) ** 2
    second = rows.groupby(keys, as_index=False)[["squared_norm", "square"]].sum(min_count=1)
    both = pd.merge(first, second, on=keys, suffixes=("_predicted", ""))
    predicted = both["squared_norm_predicted"] * per_sequence(prediction, measurement)
    measured = both["squared_norm"]
    both = both[keys].assign(
        predicted=predicted, measured=measured, stderr=np.sqrt(both["square"].to_numpy(float))
    )
    both["error"] = (predicted - measured) / measured.where(measured > 0, 1.0)
    return both
