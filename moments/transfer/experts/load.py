"""How evenly tokens are routed in one draw of the router: load, its spread, and the loss on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...engine.state import ratio_or_zero
from ...engine.trace import Record
from .mixture import Mixture
from .routing import Router

DRAWS, TOKENS = 200, 256
"""Of the router, and tokens of each, where one draw is sampled."""
STARVING = 0.1
"""An expert starves with less than this part of an even share."""


class OneDraw(NamedTuple):
    """What one draw of the router does, in the mean over draws.

    Attributes:
        largest: tokens of the expert that has most of them, over an even share.
        starving: part of the experts with less than `STARVING` of an even share.
        balance: E sum_e f_e p_e of the tokens' shares f and the mean probabilities p (Switch
            Transformer's auxiliary loss without its coefficient; k where all is even).
    """

    largest: float
    starving: float
    balance: float


def one_draw(router: Router, s: float, r: float, tokens: int) -> OneDraw:
    """Of tokens whose logits have variance s and correlate alike, by r.

    Sampled: given what the tokens have in common, sqrt(r) c of the logits, they are independent.
    """
    random = np.random.default_rng(0)
    count, experts = min(tokens, TOKENS), router.experts
    found = []
    for _ in range(DRAWS):
        common, own = random.standard_normal(experts), random.standard_normal((count, experts))
        z = np.sqrt(s) * (np.sqrt(max(r, 0.0)) * common + np.sqrt(1 - max(r, 0.0)) * own)
        share = router.choice(z).mean(0)
        weight, _ = router.weight(z)
        mean = (weight / weight.sum(-1, keepdims=True)).mean(0)
        load = share * experts / router.chosen
        found.append((load.max(), (load < STARVING).mean(), experts * (share * mean).sum()))
    return OneDraw(*map(float, np.mean(found, axis=0)))


def rows(stack: Record) -> Iterator[dict[str, Any]]:
    """A row for every mixture of several experts that a signal has passed, as
    `moments.Prediction.experts` has them."""
    for record in stack.leaves():
        leaf = record.component
        if not isinstance(leaf, Mixture) or leaf.router.experts == 1:
            continue
        signal, router = record.input, leaf.router
        at, length = leaf.routed(signal), signal.seq_len
        ones = at.load.with_ones().total(length)
        tokens = signal.second_moment()
        gain = leaf.d_model * leaf.router_variance
        covariance = gain * tokens.mean_pairs() + leaf.bias_variance
        correlation = float(np.mean(ratio_or_zero(covariance, at.logits)))
        s = float(np.mean(at.logits))
        shared = float(np.mean(at.load.total(length) / ones))
        even = router.chosen / router.experts
        drawn = one_draw(router, s, correlation, round(float(np.mean(ones)) ** 0.5))
        yield {
            "layer": record.layer,
            "experts": router.experts,
            "chosen": router.chosen,
            "logit_variance": s,
            "logit_correlation": correlation,
            "gate_square": float(np.mean(at.gates.mean_diagonal())),
            "gate_overlap": float(np.mean(at.gates.mean_pairs())),
            "load": even,
            "load_variance": max(shared / router.experts / even**2 - 1.0, 0.0),
            "largest_load": drawn.largest,
            "starving": drawn.starving,
            "balance_loss": drawn.balance,
            "learns": bool(np.any(at.slopes.diagonal > 0)),
        }
