"""What makes a finite attention layer fluctuate."""

from __future__ import annotations

import math
from typing import NamedTuple


class Widths(NamedTuple):
    """Widths of one layer.

    Attributes:
        d_model, d_head: widths, inf allowed.
        norm_spread: Var|x|^2 / E^2|x|^2 of a token: 0 after a normalisation, 2/d_model if Gaussian.
    """

    d_model: float
    d_head: float
    norm_spread: float

    @property
    def freedom(self) -> float:
        """nu: degrees of freedom of a row's logit variance, before fixed norms take their part."""
        inverse = 1.0 / self.d_head + 1.0 / self.d_model + 0.5 * self.norm_spread
        return 1.0 / inverse if inverse > 1e-12 else math.inf

    @property
    def deficit(self) -> float:
        """delta: half of what the tokens' norms fluctuate less than Gaussian ones."""
        return max(0.0, 1.0 / self.d_model - 0.5 * self.norm_spread)

    @property
    def deficit_share(self) -> float:
        """delta over the relative variance 2/nu."""
        return 0.5 * self.deficit * self.freedom if self.deficit > 1e-12 else 0.0
