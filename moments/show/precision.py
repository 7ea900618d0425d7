"""Share of Gaussian entries that are too small or too large for floating-point formats.

A format with p stored bits of mantissa, smallest normal number 2^e and largest finite number M
rounds to nearest, ties to even. Its subnormal numbers are multiples of u = 2^(e - p), so that for
x ~ N(0, s^2)

    P(x becomes 0)         = P(|x| <= u/2)             = erf(u / (2 s sqrt 2)),
    P(x becomes subnormal) = P(u/2 < |x| < 2^e - u/2)  = erf((2^e - u/2) / (s sqrt 2)) - the above,
    P(x overflows)         = P(|x| > M + h)            = erfc((M + h) / (s sqrt 2)),

with h half the distance from M to the next number of an unbounded format. Derived here; a test
compares them with casts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..formulas.quantization import E4M3, E5M2, Elements

if TYPE_CHECKING:
    import pandas as pd

    from ..prediction.result import Prediction


@dataclass(frozen=True)
class Format(Elements):
    """A floating-point format: its numbers, torch's `name` and the usual `title`."""

    name: str
    title: str

    @property
    def step(self) -> float:
        """The smallest subnormal number u."""
        return 2.0 ** (self.lowest - self.mantissa)

    @property
    def limit(self) -> float:
        """M + h, beyond which numbers round to infinity."""
        return self.largest + 2.0 ** (math.floor(math.log2(self.largest)) - self.mantissa - 1)

    def shares(self, variance: np.ndarray | float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Shares of Gaussian entries of a variance that become 0, become subnormal, overflow."""
        from scipy.special import erf, erfc

        root = np.sqrt(2 * np.asarray(variance, dtype=float))
        with np.errstate(divide="ignore"):
            zero = erf(self.step / 2 / root)
            below = erf((2.0**self.lowest - self.step / 2) / root)
            return zero, below - zero, erfc(self.limit / root)


FORMATS = (
    Format(7, -126, (2 - 2.0**-7) * 2.0**127, "bfloat16", "bf16"),
    Format(10, -14, 65504.0, "float16", "fp16"),
    Format(E4M3.mantissa, E4M3.lowest, E4M3.largest, "float8_e4m3fn", "fp8 E4M3"),
    Format(E5M2.mantissa, E5M2.lowest, E5M2.largest, "float8_e5m2", "fp8 E5M2"),
)


def precision(prediction: Prediction) -> pd.DataFrame:
    """Predict what every format loses at every point of a network, forward and backward.

    Entries count as Gaussian of the predicted variance, unscaled. Columns: layer, site, way
    ("forward" or "gradient"), format, variance, zero, subnormal, overflow (shares of entries).
    """
    import pandas as pd

    frame = prediction.to_frame()
    parts = []
    for way, column in (("forward", "variance"), ("gradient", "grad_variance")):
        rows = frame[frame[column] > 0]
        for form in FORMATS:
            part = rows[["layer", "site"]].assign(way=way, format=form.title, variance=rows[column])
            shares = form.shares(rows[column].to_numpy(float))
            lost = dict(zip(("zero", "subnormal", "overflow"), shares, strict=True))
            parts.append(part.assign(**lost))
    return pd.concat(parts, ignore_index=True)
