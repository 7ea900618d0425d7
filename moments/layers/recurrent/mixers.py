"""The sampled heads of every mixer: their input rows, further parameters and function."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...model.block import Block
from ...model.mixers import RGLRU, GatedDeltaNet, LinearAttention, Mamba, Mamba2
from .drawn import Head, Inner, Section
from .heads import (
    FUNCTIONS,
    by_heads,
    convolved,
    decays,
    delta_rule,
    joined,
    kept_products,
    normalised,
    recurred,
    scan,
    selective_scan,
    sigmoid,
    silu,
    softplus,
    transposed,
)

Array = Any
Arrays = dict[str, Array]

MOST_HEADS, MOST_FEATURES = 32, 256
"""Most heads with a common norm or common keys in one draw (of more heads, an evenly spaced
subset), and most features of these heads together."""

UNIT_EPSILON = 1e-6
"""Added to the squared norms of queries and keys in the delta rule."""


def taps(random: np.random.Generator, block: Any, draws: int, features: int) -> Array:
    """(draws, kernel, features) of a short convolution."""
    size = draws, block.kernel, features
    if getattr(block, "tap_distribution", "uniform") == "uniform":
        return random.uniform(-1.0, 1.0, size) * np.sqrt(3 * block.tap_variance)
    return random.standard_normal(size) * np.sqrt(block.tap_variance)


def spread(random: np.random.Generator, size: tuple[int, ...]) -> Array:
    """Stratified uniform numbers in (0, 1), in random order."""
    count = int(np.prod(size))
    result = (random.permutation(count) + random.random(count)) / count
    return result.reshape(size)


def step_bias(random: np.random.Generator, block: Any, size: tuple[int, ...]) -> Array:
    """b with softplus(b) uniform in its logarithm between the block's `steps`."""
    low, high = np.log(block.steps)
    step = np.exp(low + (high - low) * spread(random, size))
    return step + np.log(-np.expm1(-step))


def behind_taps(x: Array, own: Arrays, name: str) -> Array:
    """Apply a short convolution, with its bias if any."""
    x = convolved(x, own[f"{name}.taps"])
    bias = own.get(f"{name}.taps.bias")
    return x if bias is None else x + np.expand_dims(bias, 1)


@dataclass(frozen=True)
class Mamba2Heads(Head):
    """Heads of one group of Mamba-2: they share B, C and the norm."""

    block: Mamba2
    most: float = math.inf

    @property
    def _drawn(self) -> int:
        drawn = min(self.block.heads // self.block.groups, MOST_HEADS)
        if self.most < drawn * self.block.d_head:  # heads with equal numbers of features
            drawn = max(n for n in range(1, drawn + 1) if self.most % n == 0)
        return drawn

    @property
    def sections(self) -> dict[str, Section]:
        block, drawn = self.block, self._drawn
        subsampling = block.d_head / self._width  # features of a head over sampled ones
        uses = block.heads / block.groups / drawn * subsampling
        shared = Section(block.groups * block.state, block.state, uses)
        values = Section(block.heads * block.d_head, self.features)
        return {
            "value": values,
            "key": shared,
            "query": shared,
            "mixer_gate": values,
            "mixer_step": Section(block.heads, drawn, subsampling),
        }

    @property
    def _width(self) -> int:
        """Sampled features of a head's values."""
        most = min(self.most, MOST_FEATURES)
        return min(self.block.d_head, max(1, int(most // self._drawn)))

    @property
    def features(self) -> int:
        return self._drawn * self._width

    @property
    def pairs(self) -> int:
        return self._drawn

    def own(self, random: np.random.Generator, draws: int) -> Arrays:
        block, drawn = self.block, self._drawn
        result = {
            f"{name}.taps": taps(random, block, draws, self.sections[name].drawn)
            for name in ("value", "key", "query")
        }
        if block.tap_bias:
            for name in ("value", "key", "query"):
                result[f"{name}.taps.bias"] = np.zeros((draws, self.sections[name].drawn))
        result["mixer_step.bias"] = step_bias(random, block, (draws, drawn))
        result["rate"] = np.log(self._rates(random, draws))
        result["skip"] = np.full((draws, drawn), block.skip)
        if block.norm:
            result["mixer_norm.gain"] = np.ones((draws, self.features))
        return result

    def _rates(self, random: np.random.Generator, draws: int) -> Array:
        """(draws, heads) decay rates: uniform in a range, or those of evenly spaced heads."""
        block, drawn, rates = self.block, self._drawn, self.block.rates
        if rates is not None and len(rates) == 2 and block.heads != 2:
            low, high = rates
            return low + (high - low) * spread(random, (draws, drawn))
        by_head = np.arange(1.0, block.heads + 1) if rates is None else np.array(rates)
        by_group = by_head.reshape(block.groups, -1)[np.arange(draws) % block.groups]
        place = (np.arange(drawn) + spread(random, (draws, 1))) * by_group.shape[1] / drawn
        return np.take_along_axis(by_group, place.astype(int), 1)

    def kept(self, entering: Arrays, own: Arrays) -> Array:
        return np.exp(self._steps(entering, own)[1])

    def _steps(self, entering: Arrays, own: Arrays) -> tuple[Array, Array]:
        """(draws, heads, L) steps, and logarithms of the decays."""
        steps = np.swapaxes(entering["mixer_step"], 1, 2)
        steps = softplus(steps + np.expand_dims(own["mixer_step.bias"], -1))
        if self.block.least_step or self.block.most_step:
            steps = np.clip(steps, self.block.least_step, self.block.most_step or np.inf)
        return steps, -steps * np.expand_dims(np.exp(own["rate"]), -1)

    def before_norm(self, entering: Arrays, own: Arrays) -> Array:
        block, drawn = self.block, self._drawn
        value, key, query = (
            silu(behind_taps(entering[name], own, name)) for name in ("value", "key", "query")
        )
        steps, logs = self._steps(entering, own)
        values = by_heads(value, drawn)
        key, query = np.expand_dims(key, 1), np.expand_dims(query, 1)
        mixed = scan(query, key, values, logs, steps)
        mixed = joined(mixed + np.expand_dims(own["skip"], (-1, -2)) * values)
        gated = block.norm and not block.norm_before_gate
        return mixed * silu(entering["mixer_gate"]) if gated else mixed

    def __call__(self, entering: Arrays, own: Arrays) -> Array:
        block, mixed = self.block, self.before_norm(entering, own)
        if block.norm:
            gain = np.expand_dims(own["mixer_norm.gain"], 1)
            mixed = normalised(mixed, block.norm_epsilon) * gain
        gated = block.norm and not block.norm_before_gate
        return mixed if gated else mixed * silu(entering["mixer_gate"])


@dataclass(frozen=True)
class MambaFeatures(Head):
    """At most `MOST_FEATURES` features of Mamba's x, with the B, C and steps made of them.

    B, C and steps are sums over all features, `_more` times those of a draw: the variance of their
    weights is multiplied by this factor. Their gradients are sums over features with independent
    gradients, so squared norms are multiplied by it too.
    """

    block: Mamba
    most: float = math.inf

    @property
    def features(self) -> int:
        return int(min(self.block.width, MOST_FEATURES, self.most))

    @property
    def _more(self) -> float:
        return self.block.width / self.features

    @property
    def states(self) -> int:
        return 4 * self.features * self.block.state

    @property
    def effort(self) -> int:
        return 3

    @property
    def sections(self) -> dict[str, Section]:
        return dict.fromkeys(("value", "mixer_gate"), Section(self.block.width, self.features))

    @property
    def inner(self) -> dict[str, Inner]:
        block, width, more = self.block, self.features, self._more
        state = Inner(width, block.state, more**2)
        steps = {"mixer_step_down": Inner(width, block.step_rank, more**2)}
        steps["mixer_step"] = Inner(block.step_rank, width, more)
        return {"key": state, "query": state} | steps

    def own(self, random: np.random.Generator, draws: int) -> Arrays:
        block, width = self.block, self.features
        rates = np.arange(1.0, block.state + 1) if block.rates is None else np.array(block.rates)
        result = {
            "value.taps": taps(random, block, draws, width),
            "mixer_step.bias": step_bias(random, block, (draws, width)),
            "rate": np.broadcast_to(np.log(rates), (draws, width, block.state)),
            "skip": np.full((draws, width), block.skip),
        }
        if block.tap_bias:
            result["value.taps.bias"] = np.zeros((draws, width))
        if block.inner_norm == "affine":
            result |= {f"{name}.norm.gain": np.ones((draws, n)) for name, n in self._normed.items()}
        return result

    @property
    def _normed(self) -> dict[str, int]:
        inner = self.inner
        return {name: inner[name].fan_out for name in ("mixer_step_down", "key", "query")}

    def _projected(self, x: Array, own: Arrays, name: str) -> Array:
        """x times an inner matrix, normalised if the block normalises it."""
        result = x @ own[name]
        if self.block.inner_norm is None:
            return result
        result = normalised(result, self.block.norm_epsilon)
        gain = own.get(f"{name}.norm.gain")
        return result if gain is None else result * np.expand_dims(gain, 1)

    def _parts(self, entering: Arrays, own: Arrays) -> tuple[Array, Array]:
        """(draws, L, features) x after its convolution, and its steps."""
        x = silu(behind_taps(entering["value"], own, "value"))
        steps = self._projected(x, own, "mixer_step_down") @ own["mixer_step"]
        return x, softplus(steps + np.expand_dims(own["mixer_step.bias"], 1))

    def kept(self, entering: Arrays, own: Arrays) -> Array:
        _, steps = self._parts(entering, own)
        return np.exp(-np.expand_dims(steps, -1) * np.expand_dims(np.exp(own["rate"]), 1))

    def __call__(self, entering: Arrays, own: Arrays) -> Array:
        x, steps = self._parts(entering, own)
        key, query = (self._projected(x, own, name) for name in ("key", "query"))
        mixed = selective_scan(query, key, x, np.exp(own["rate"]), steps)
        return (mixed + np.expand_dims(own["skip"], 1) * x) * silu(entering["mixer_gate"])


@dataclass(frozen=True)
class RecurrentUnit(Head):
    """At most `MOST_FEATURES` features of one block of an RG-LRU, like `MambaFeatures`."""

    block: RGLRU
    most: float = math.inf

    @property
    def features(self) -> int:
        return int(min(self.block.width // self.block.blocks, MOST_FEATURES, self.most))

    @property
    def states(self) -> int:
        return 8 * self.features

    @property
    def sections(self) -> dict[str, Section]:
        return dict.fromkeys(("value", "mixer_gate"), Section(self.block.width, self.features))

    @property
    def inner(self) -> dict[str, Inner]:
        block, width = self.block, self.features
        served = (block.width / block.blocks / width) ** 2 * block.blocks
        return dict.fromkeys(("mixer_input", "mixer_step"), Inner(width, width, served))

    def own(self, random: np.random.Generator, draws: int) -> Arrays:
        block, size = self.block, (draws, self.features)
        low, high = (decay * decay for decay in block.decays)
        logs = -0.5 * np.log(low + (high - low) * spread(random, size))
        result = {"rate": np.log(np.expm1(logs))}
        result["value.taps"] = taps(random, block, draws, self.features)
        names = "value.taps", "value", "mixer_gate", "mixer_input", "mixer_step"
        return result | {f"{name}.bias": np.zeros(size) for name in names}

    def kept(self, entering: Arrays, own: Arrays) -> Array:
        return np.exp(self._parts(entering, own)[1])

    def _parts(self, entering: Arrays, own: Arrays) -> tuple[Array, Array]:
        """x after its convolution, and logarithms of the decays."""
        x = behind_taps(entering["value"] + np.expand_dims(own["value.bias"], 1), own, "value")
        gate = sigmoid(x @ own["mixer_step"] + np.expand_dims(own["mixer_step.bias"], 1))
        return x, gate * np.expand_dims(-8.0 * softplus(own["rate"]), 1)

    def __call__(self, entering: Arrays, own: Arrays) -> Array:
        x, logs = self._parts(entering, own)
        gate = sigmoid(x @ own["mixer_input"] + np.expand_dims(own["mixer_input.bias"], 1))
        first = np.arange(x.shape[1])[:, None] == 0
        written = np.where(first, 1.0, np.sqrt(1.0 - np.exp(2.0 * logs))) * gate * x
        out = entering["mixer_gate"] + np.expand_dims(own["mixer_gate.bias"], 1)
        return recurred(written, logs) * FUNCTIONS[self.block.gate](out)


@dataclass(frozen=True)
class DeltaHead(Head):
    """One value head of a gated delta net."""

    block: GatedDeltaNet

    @property
    def sections(self) -> dict[str, Section]:
        block, heads = self.block, self.block.value_heads
        keys = Section(block.key_heads * block.d_key, block.d_key, heads / block.key_heads)
        values, rate = Section(heads * block.d_value, block.d_value), Section(heads, 1)
        result = {"query": keys, "key": keys, "value": values, "mixer_rate": rate}
        if block.rank is not None:
            down = Section(block.rank, block.rank, heads)
            return result | {"mixer_gate_down": down, "mixer_step_down": down}
        steps = Section(heads * self._steps, self._steps)
        return result | {"mixer_gate": values, "mixer_step": steps}

    @property
    def _steps(self) -> int:
        return self.block.d_key if self.block.decay == "channel" else 1

    @property
    def inner(self) -> dict[str, Inner]:
        block = self.block
        if block.rank is None:
            return {}
        widths = {"mixer_gate": block.d_value, "mixer_step": self._steps}
        return {k: Inner(block.rank, n, block.value_heads) for k, n in widths.items()}

    @property
    def features(self) -> int:
        return self.block.d_value

    @property
    def pairs(self) -> int:
        return 4 * self._steps

    @property
    def effort(self) -> int:
        return 6 if self.block.decay == "channel" else 1

    def own(self, random: np.random.Generator, draws: int) -> Arrays:
        block = self.block
        result = {
            f"{name}.taps": taps(random, block, draws, self.sections[name].drawn)
            for name in ("query", "key", "value")
        }
        low, high = block.rates
        result["mixer_step.bias"] = step_bias(random, block, (draws, self._steps))
        result["rate"] = np.log(low + (high - low) * spread(random, (draws, 1)))
        result["mixer_norm.gain"] = np.ones((draws, block.d_value))
        return result

    def _full_rank(self, entering: Arrays, own: Arrays, name: str) -> Array:
        """Pre-activations of gate or steps, through their second matrix if they have low rank."""
        if self.block.rank is None:
            return entering[name]
        return entering[f"{name}_down"] @ own[name]

    def kept(self, entering: Arrays, own: Arrays) -> Array:
        return np.exp(self._logs(entering, own))

    def _logs(self, entering: Arrays, own: Arrays) -> Array:
        step = self._full_rank(entering, own, "mixer_step")
        step = softplus(step + np.expand_dims(own["mixer_step.bias"], 1))
        logs = -step * np.expand_dims(np.exp(own["rate"]), 1)
        return logs if self.block.decay == "channel" else logs[..., 0]

    def before_norm(self, entering: Arrays, own: Arrays) -> Array:
        block = self.block
        query, key, value = (
            silu(convolved(entering[name], own[f"{name}.taps"]))
            for name in ("query", "key", "value")
        )
        query, key = _unit(query), _unit(key)
        rate = sigmoid(entering["mixer_rate"]) * (2.0 if block.twice else 1.0)
        query = query * block.d_key**-0.5
        return delta_rule(query, key, value, self._logs(entering, own), rate[..., 0])

    def __call__(self, entering: Arrays, own: Arrays) -> Array:
        output = normalised(self.before_norm(entering, own), self.block.norm_epsilon)
        gate = FUNCTIONS[self.block.gate](self._full_rank(entering, own, "mixer_gate"))
        return output * np.expand_dims(own["mixer_norm.gain"], 1) * gate


def _unit(x: Array) -> Array:
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + UNIT_EPSILON)


@dataclass(frozen=True)
class DrawnLinearHeads(Head):
    """Heads of linear attention with a common norm, or a single head."""

    block: LinearAttention
    most: float = math.inf

    @property
    def _drawn(self) -> int:
        if self.block.norm != "all":
            return 1
        block = self.block
        fit = min(self.most, block.heads * block.d_value) // block.d_value
        return int(min(block.heads, MOST_HEADS, max(1, fit)))

    @property
    def sections(self) -> dict[str, Section]:
        block, drawn = self.block, self._drawn
        keys = Section(block.heads * block.d_key, drawn * block.d_key)
        values = Section(block.heads * block.d_value, drawn * block.d_value)
        result = {"query": keys, "key": keys, "value": values}
        if block.gate is not None:
            result["mixer_gate"] = values
        if block.decay_gate is not None:
            by_channel = block.decay_gate == "channel"
            result["mixer_step"] = keys if by_channel else Section(block.heads, drawn)
        return result

    @property
    def features(self) -> int:
        return self._drawn * self.block.d_value

    @property
    def pairs(self) -> int:
        by_channel = self.block.decay_gate == "channel"
        return self._drawn * (self.block.d_key if by_channel else 1)

    def own(self, random: np.random.Generator, draws: int) -> Arrays:
        block, result = self.block, {}
        if block.decays is not None:
            by_head, drawn = np.array(block.decays), self._drawn
            place = (np.arange(drawn) + spread(random, (draws, 1))) * len(by_head) / drawn
            result["decay"] = by_head[place.astype(int)]
        if block.norm is not None:
            result["mixer_norm.gain"] = np.ones((draws, self.features))
        return result

    def kept(self, entering: Arrays, own: Arrays) -> Array:
        if self.block.decay_gate is None:
            return own.get("decay", np.ones((1, 1)))
        return np.exp(self._logs(entering))

    def _logs(self, entering: Arrays) -> Array:
        x = np.swapaxes(entering["mixer_step"], 1, 2) + self.block.decay_bias
        return -softplus(-x) / self.block.decay_power

    def before_norm(self, entering: Arrays, own: Arrays) -> Array:
        block, function = self.block, FUNCTIONS[self.block.feature_map]
        query, key, value = (
            by_heads(function(entering[name]), self._drawn) for name in ("query", "key", "value")
        )
        mixed = self._mixing(entering, own, query * block.scale, key) @ value
        return mixed if block.norm == "head" else joined(mixed)

    def __call__(self, entering: Arrays, own: Arrays) -> Array:
        block, mixed = self.block, self.before_norm(entering, own)
        if block.norm is not None:
            mixed = normalised(mixed, block.norm_epsilon)
            mixed = joined(mixed) if block.norm == "head" else mixed
            mixed = mixed * np.expand_dims(own["mixer_norm.gain"], 1)
        if block.gate is not None:
            mixed = mixed * FUNCTIONS[block.gate](entering["mixer_gate"])
        return mixed

    def _mixing(self, entering: Arrays, own: Arrays, query: Array, key: Array) -> Array:
        """(draws, heads, L, L) matrices from values to outputs."""
        block, tokens = self.block, query.shape[-2]
        if block.decay_gate is not None:
            logs = self._logs(entering)
            if block.decay_gate == "channel":
                logs = np.reshape(logs, (len(logs), self._drawn, block.d_key, tokens))
                return kept_products(query, key, transposed(logs))
            return (query @ transposed(key)) * decays(logs)
        mixing = query @ transposed(key)
        if block.decays is None:
            return mixing * np.tri(tokens, dtype=bool)
        lag = np.subtract.outer(np.arange(tokens), np.arange(tokens))
        return mixing * (own["decay"][..., None, None] ** np.maximum(lag, 0) * (lag >= 0))


HEADS: dict[type[Block], Any] = {
    LinearAttention: DrawnLinearHeads,
    Mamba: MambaFeatures,
    Mamba2: Mamba2Heads,
    GatedDeltaNet: DeltaHead,
    RGLRU: RecurrentUnit,
}
"""The sampled heads of a mixer, by its class."""
