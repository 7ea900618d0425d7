"""The spread of one draw of the weights at finite width.

A realised kernel x_i . x_j / d differs from its mean by O(1/sqrt(d)). With tokens alike it has two
independent kinds of modes over tokens: the token mean, with eigenvalue v + (L - 1) c, and L - 1
differences with eigenvalue v - c, of which the average matters. A random matrix applied to tokens
with eigenvalues m gives realised ones of relative variance 2/(d n), n = 1 or L - 1 being the number
of modes averaged over; at a residual addition of carried T and added B (independent in direction)

    Var(m) = (4 T B + kappa B^2) / (d n),    kappa/d = relative variance of |branch|^2.

These fluctuations then propagate linearly. Let x_k be the relative fluctuation of the signal's modes
entering part k of the network and y_k that of the gradient's modes there. Linearising both passes,

    x_{k+1} = R_k x_k + noise,    y_k = P_k y_{k+1} + H_k x_k + noise,

where P_k is the pullback, and H_k its dependence on the signal (norms, softmax, activations). The
noises of both passes are independent to leading order: W enters the signal along x and the gradient
along a direction independent of x. Writing y_k = K_k x_k + e_k with e_k independent of x_k,

    K_k = P_k K_{k+1} R_k + H_k,
    Cov e_k = P_k (Cov e_{k+1} + K_{k+1} Xi_k K_{k+1}^T) P_k^T + N_k,
    Cov y_k = Cov e_k + K_k Cov(x_k) K_k^T,

one pass up for Cov(x_k) and one pass down for all depths at once. No law is stated here a second
time: R, P and H come from the components themselves, evaluated for all layers together.

One draw is close to lognormal: sigma^2 = Var log g, typical = mean exp(-sigma^2/2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .attention import SelfAttention
from .composition import Chain, Component, Layer, Leaf, Residual
from .propagate import Trace, forward
from .state import Array, Gradient, Kernel, Signal

STEP = 1e-5
"""Relative step of the one-sided differences, whose error is of this order."""

NORMAL_95 = 1.959963984540054
"""Half width, in standard deviations, of the central 95 % of a normal distribution."""


@dataclass(frozen=True)
class Modes:
    """The two eigenvalues of an exchangeable kernel over L tokens, last axis (mean, difference)."""

    seq_len: int

    @property
    def count(self) -> Array:
        """Number of modes of each kind."""
        return np.array([1.0, self.seq_len - 1.0])

    @property
    def average(self) -> Array:
        """Weights with which the modes make up the variance of a token."""
        return self.count / self.seq_len

    def of(self, kernel: Kernel) -> Array:
        """Eigenvalues (..., 2) of a kernel."""
        diagonal, pairs = np.broadcast_arrays(kernel.diagonal, kernel.pairs)
        return np.stack([diagonal + (self.seq_len - 1) * pairs, diagonal - pairs], axis=-1)

    def kernel(self, modes: Array) -> Kernel:
        """The kernel with eigenvalues (..., 2)."""
        mean, difference = modes[..., 0], modes[..., 1]
        pairs = (mean - difference) / self.seq_len
        return Kernel(difference + pairs, pairs)


class Linearised(NamedTuple):
    """One part of the network about its mean; the leading axis counts layers.

    Attributes:
        response: (..., 2, 2) R, of relative modes to relative modes.
        signal_noise: (..., 2) own relative variance of the outgoing signal's modes.
        pull: (..., 2, 2) P, of gradient modes over their variance to the same.
        exposure: (..., 2, 2) H.
        gradient_noise: (..., 2) own variance of the incoming gradient's modes.
    """

    response: Array
    signal_noise: Array
    pull: Array
    exposure: Array
    gradient_noise: Array


def log_variance(declaration: Chain, trace: Trace, batch: int = 1) -> Array:
    """Var log g of the gradient variance at every point of the stream, shape (..., N + 1).

    Args:
        declaration: the stack of layers, as it was propagated through.
        trace: what both passes saw, tokens alike.
        batch: sequences of independent input and gradient that share the weights.
    """
    stream = trace.stream()
    seq_len = stream[0].signal.seq_len
    modes = Modes(seq_len)
    layers = [part for part in declaration.parts if isinstance(part, Layer)]
    overlaps = _sequence_overlaps(layers, trace) if batch > 1 else None
    with np.errstate(divide="ignore", invalid="ignore"):
        steps, ends = _linearise_layers(layers, trace, modes, batch, overlaps)
        first = 0.0 if overlaps is None else overlaps[0]
        entering = _initial(stream[0].signal, modes, batch, first)
        signal = [entering]
        for step in steps:
            signal.append(_congruence(step.response, signal[-1]) + _diagonal(step.signal_noise))
        top = stream[-1].gradient
        assert top is not None
        injected = modes.of(top.kernel) / np.asarray(top.kernel.diagonal)[..., None]
        own = _diagonal(2 * injected**2 / (stream[-1].signal.width * modes.count * batch))
        gain = np.zeros_like(own)
        total = [own]
        for step, before in zip(reversed(steps), reversed(signal[:-1]), strict=True):
            own = _congruence(step.pull, own + _congruence(gain, _diagonal(step.signal_noise)))
            own = own + _diagonal(step.gradient_noise)
            gain = step.pull @ gain @ step.response + step.exposure
            total.append(own + _congruence(gain, before))
    total.reverse()
    chosen = np.stack([total[end] for end in ends], axis=-3)
    variance = np.einsum("...ij,i,j->...", chosen, modes.average, modes.average)
    return np.where(np.isfinite(variance), variance, 0.0)


def band(mean: Array, log_variance: Array) -> tuple[Array, Array]:
    """Typical value (geometric mean) and 95 % interval of a lognormal quantity.

    Args:
        mean: its expectation, shape (...,).
        log_variance: variance of its logarithm, shape (...,).

    Returns:
        The typical value (...,), and the interval's two ends (2, ...).
    """
    typical = mean * np.exp(-log_variance / 2)
    half = np.exp(NORMAL_95 * np.sqrt(log_variance))
    return typical, np.stack([typical / half, typical * half])


# --- linear algebra over a last pair of axes -----------------------------------------------------


def _diagonal(entries: Array) -> Array:
    return entries[..., None] * np.eye(2)


def _congruence(matrix: Array, covariance: Array) -> Array:
    return matrix @ covariance @ np.swapaxes(matrix, -1, -2)


def _ratio(numerator: Array, denominator: Array) -> Array:
    """A ratio; 0 where there is no such mode (tokens identical, or of zero sum)."""
    numerator, denominator = np.broadcast_arrays(numerator, denominator)
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator != 0)


# --- all layers at once --------------------------------------------------------------------------


def stacked(components: Sequence[Any]) -> Any:
    """One component whose numbers are arrays over `components`, which must be alike in structure.

    Numbers that agree stay as they are.
    """
    first = components[0]
    if isinstance(first, Component):
        changes = {
            f.name: stacked([getattr(c, f.name) for c in components])
            for f in dataclasses.fields(first)  # type: ignore[arg-type]
        }
        return dataclasses.replace(first, **changes)  # type: ignore[type-var]
    if isinstance(first, tuple):
        return tuple(stacked(entries) for entries in zip(*components, strict=True))
    if isinstance(first, Mapping):
        return {name: stacked([c[name] for c in components]) for name in first}
    if isinstance(first, int | float) and any(c != first for c in components):
        return np.array(components, dtype=float)
    return first


def _structure(component: Component) -> Any:
    """What components must share to be stacked."""
    if isinstance(component, Chain):
        return tuple(_structure(part) for part in component.parts)
    if isinstance(component, Residual):
        return (component.label, _structure(component.branch))
    return (type(component), component.label)


def _parts(layer: Layer) -> tuple[Component, ...]:
    return layer.body.parts if isinstance(layer.body, Chain) else (layer.body,)


def _sites(layers: Sequence[Layer], trace: Trace) -> list[list[Any]]:
    """Points before the first part, between the parts and after the last, of every layer."""
    by_place = {(point.layer, point.site): point for point in trace.points}
    stream = trace.stream()
    sites = []
    for index, layer in enumerate(layers):
        inner = [by_place[layer.number, part.label] for part in _parts(layer)]
        sites.append([stream[index], *inner])
    return sites


def _linearise_layers(
    layers: Sequence[Layer], trace: Trace, modes: Modes, batch: int, overlaps: list[Array] | None
) -> tuple[list[Linearised], list[int]]:
    """Every part of every layer in order, and where among them the points of the stream lie."""
    sites = _sites(layers, trace)
    starts = np.cumsum([0, *(len(_parts(layer)) for layer in layers)])
    places: dict[Any, list[tuple[int, int]]] = {}
    for index, layer in enumerate(layers):
        for position, part in enumerate(_parts(layer)):
            places.setdefault(_structure(part), []).append((index, position))
    steps: dict[int, Linearised] = {}
    for group in places.values():
        part = stacked([_parts(layers[index])[position] for index, position in group])
        points = [sites[index][position] for index, position in group]
        above = [sites[index][position + 1].gradient for index, position in group]
        order = [int(starts[index]) + position for index, position in group]
        crossed = None if overlaps is None else np.stack([overlaps[k] for k in order])
        after = None if overlaps is None else np.stack([overlaps[k + 1] for k in order])
        whole = _linearise(
            part,
            modes,
            points[0].signal.width,
            _stack_kernels([point.signal.kernel for point in points]),
            _stack_kernels([gradient.kernel for gradient in above]),
            batch,
            None if crossed is None else (crossed, after),
        )
        steps |= {k: Linearised(*(entry[row] for entry in whole)) for row, k in enumerate(order)}
    return [steps[k] for k in range(len(steps))], [int(start) for start in starts]


def _stack_kernels(kernels: Sequence[Kernel]) -> Kernel:
    return Kernel(
        np.array([kernel.diagonal for kernel in kernels], dtype=float),
        np.array([kernel.pairs for kernel in kernels], dtype=float),
    )
