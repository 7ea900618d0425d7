"""Alternating updates: several streams of which the layers read and correct one (`moments.AltUp`).

The coefficients of prediction and correction start at 0 and 1, so all streams receive what a layer
changes in the first: with e the embedding and u_i = W_i e, rescaled to its size,

    x_i = u_i + x_0 - e,    x_0 = a e + r,

r orthogonal to e and u_i, a the amplitude that skip connections and norms leave. Gradients g_i of
the other streams pass all layers unchanged, and that of what is added to all streams,
h = g_0 + sum g_i, is the gradient of a network of one stream. See docs/theory/streams.md, AltUp.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..engine.bottom_to_top import at_both, crossed
from ..engine.composition import Chain, Component, PullbackResult, added
from ..engine.state import Array, Fluctuation, Gradient, Kernel, Signal, Values, ratio_or_zero
from ..engine.trace import Record, Run
from ..formulas.activation import activation_laws
from ..formulas.algebra import FLOAT
from ..formulas.linear import LINEAR
from ..formulas.normalization import RMSNORM
from ..model.streams import AltUp
from ..model.transformer import Transformer
from .elementary import Linear
from .normalization import FiniteNormalization
from .per_layer import rows

BEGIN, CARRIED, GRADIENT = "streams at the beginning", "amplitude of the embedding", "other streams"
"""Keys in `Run.kept`: of e and u_i, of a behind every layer, and of `_Others`."""
LEAST = 1e-20
"""Epsilon of the rescaling, for tokens that are 0."""


class _Others(NamedTuple):
    """Streams other than the first behind the last layer.

    Attributes:
        gradient: kernel of one g_i.
        kernel: of one x_i.
        carried: a.
    """

    gradient: Kernel
    kernel: Kernel
    carried: Array


class _First(NamedTuple):
    """The first stream at either end of a layer.

    Attributes:
        kernel, product, top: of it, of it with another tensor, and with x_i behind the last layer.
        passed, along: as `AltUpLayer._passed` returns.
    """

    kernel: Kernel
    product: Kernel
    top: Kernel
    passed: Array
    along: Array


@dataclass(frozen=True)
class AltUpLayer(Component):
    """A layer between prediction and correction.

    Attributes:
        body: the layer of one stream.
        model, number: the declaration, and the layer's number.
        ends: in the first layer the matrices W_i with a norm behind them, in the last the U_i.
    """

    body: Component
    model: Transformer
    number: int
    ends: tuple[Component, ...]
    label: str = ""

    @classmethod
    def around(cls, body: Component, model: Transformer, number: int) -> AltUpLayer:
        present = {"in": number == 1, "out": number == model.layers}
        ends = tuple(_rescaled(model, name) for name in present if present[name])
        return cls(body, model, number, ends)

    @property
    def children(self) -> tuple[Component, ...]:
        return self.body, *self.ends

    def with_children(self, children: tuple[Component, ...]) -> AltUpLayer:
        return dataclasses.replace(self, body=children[0], ends=children[1:])

    @property
    def declared(self) -> AltUp:
        assert isinstance(self.model.streams, AltUp)
        return self.model.streams

    def propagate(self, signal: Signal, run: Run) -> Record:
        number, ends = self.number, []
        if number == 1:
            ends.append(self.ends[0].propagate(signal, run))
            projected = at_both(ends[0].output.kernel, _size(signal.kernel))
            run.kept[BEGIN] = signal.kernel, projected
            run.kept[CARRIED, 0] = 1.0 + 0.0 * signal.kernel.diagonal
        body = self.body.propagate(signal, run)
        before = run.kept[CARRIED, number - 1]
        after = run.kept[CARRIED, number] = self.body.amplitude_of_input(body, before)
        output = body.output
        if number == self.model.layers:
            other = _other(output.kernel, after, run)
            gaussian = Fluctuation.of_gaussian(other, output.width)
            entering = output.replace(kernel=other, fluctuation=gaussian, centred=None)
            ends.append(self.ends[-1].propagate(entering, run))
            read = ends[-1].output
            read = read.replace(
                kernel=at_both(read.kernel, _size(output.kernel)),
                fluctuation=Fluctuation.of_gaussian(output.kernel, output.width),
            )
            count = self.declared.streams
            output = added(output, read, 1 / count**2, (count - 1) / count**2)
        return Record(
            self, run.layer, signal, output, (body, *ends), (before, after, run.kept[BEGIN])
        )

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        (body, *ends), (before, after, _) = record.children, record.pullback
        above, more = gradient, self.declared.streams - 1
        if self.number == self.model.layers:
            ends[-1], above = self._leaving(record, gradient, run)
        others: _Others = run.kept[GRADIENT]
        body = body.backward(above, run)
        weights = functools.partial(self._weights, body, above, before, after, run)
        grad_in = body.grad_in
        if self.number == 1:
            size = _size(record.input.kernel)
            start = grad_in.with_kernel(at_both(others.gradient, size))
            ends[0] = ends[0].backward(start, run)
            # e enters with -g_i too, which is correlated with h by the amplitude a
            direct = others.gradient - crossed(others.gradient, others.carried)
            total = grad_in.kernel + direct.scaled(more) + ends[0].grad_in.kernel
            grad_in = grad_in.with_kernel(total)
        return record.completed(gradient, grad_in, (body, *ends), PullbackResult(grad_in, weights))

    def _leaving(self, record: Record, gradient: Gradient, run: Run) -> tuple[Record, Gradient]:
        """The record of the matrices U_i, and the gradient h at x_0."""
        signal, count = record.children[0].output, self.declared.streams
        _, carried, (e, _) = record.pullback
        own, kernel = signal.kernel, gradient.kernel.scaled(1 / count**2)
        end = record.children[-1].backward(gradient.with_kernel(at_both(kernel, _size(own))), run)
        every, other = end.grad_in.kernel, _other(own, carried, run)
        run.kept[GRADIENT] = _Others(every.scaled(1 / (count - 1)), other, carried)
        total = kernel + every
        part = ratio_or_zero(kernel.diagonal, total.diagonal)
        # the mean grows as x_0 does, so g_0 . x_0 = g . mean; g_i has no component along x_i and
        # falls with |x_i|^2
        size = ratio_or_zero(count**2 * record.output.kernel.diagonal, own.diagonal)
        common = own.diagonal - carried * e.diagonal
        response = ratio_or_zero(common, other.diagonal)
        radial = 1.0 - response * ratio_or_zero(common, own.diagonal)
        return end, Gradient(
            total,
            gradient.seq_len,
            radial=part * size * gradient.radial + (1.0 - part) * radial,
            norm_response=part * gradient.norm_response + (1.0 - part) * response,
        )

    def _weights(
        self, body: Record, above: Gradient, before: Array, after: Array, run: Run
    ) -> Values:
        """Squared gradient norms of the router and of the matrices P and C.

        The gradient of a coefficient is g_i . v, with v = x_j or y - x_0. g_i has no component
        along x_i behind the last layer, h lacks its part along x_0 (or y) by `Gradient.radial`, and
        g_0 = h - sum g_i, where h contains g_i with the amplitude in which x_0 is passed on.
        """
        others: _Others = run.kept[GRADIENT]
        declared, (e, u) = self.declared, run.kept[BEGIN]
        count, width, length = declared.streams, float(body.input.width), above.seq_len
        more, x, y = count - 1, body.input.kernel, body.output.kernel

        def by_others(product: Kernel, v_top: Kernel, w_top: Kernel) -> Kernel:
            """(g_i . v)_s (g_i . w)_t, from the kernels of v with w and of both with x_i behind the
            last layer."""
            v, w = (ratio_or_zero(one.diagonal, others.kernel.diagonal) for one in (v_top, w_top))
            product = product - _at_second(v_top, w) - _at_second(w_top, v).transposed()
            return others.gradient * (product + _at_first(_at_second(others.kernel, w), v))

        def by_all(
            v: Kernel, tops: list[tuple[int, Kernel]], first: _First, at: Gradient
        ) -> Kernel:
            """(g_i . v)_s (g_i . v)_t, summed over all i."""
            sent = mixed = v.scaled(0.0)
            for times, top in tops:
                sent = sent + by_others(v, top, top).scaled(times)
                mixed = mixed + by_others(first.product, first.top, top).scaled(times)
            share = ratio_or_zero(first.product.diagonal, first.kernel.diagonal)
            less = _at_first(mixed, share * (first.passed - first.along))
            radial = at_both(first.kernel, share).scaled(at.averaged().radial - 1.0)
            crosses = crossed(sent, first.passed) - less - less.transposed()
            return at.kernel * (v + radial) + sent.scaled(2.0) - crosses

        kept, ends = ratio_or_zero(after, before), (self.number - 1, self.number)
        (from_x, along_x), (from_y, along_y) = (self._passed(place, run) for place in ends)
        x_top = _at_second(x, from_x) - _at_first(e, before)
        y_top = _at_second(y, from_y) - _at_first(e, after)
        other, other_top = u + e + x - crossed(e, before), x_top + e - _at_second(e, others.carried)
        change, tops = y + x - crossed(x, kept), [(1, other_top + u), (more - 1, other_top)]
        first = _First(x, x, x_top, from_x, along_x)
        predicted = by_all(x, [(more, x_top)], first, body.grad_in)
        first = first._replace(product=x - _at_first(e, before))
        predicted += by_all(other, tops, first, body.grad_in).scaled(more)
        first = _First(y, y - _at_first(x, kept), y_top, from_y, along_y)
        corrected = by_all(change, [(more, y_top - x_top)], first, above)
        norms = (at_both(one, ratio_or_zero(1.0, _size(one))) for one in (x, y))
        at_p, at_c = (
            width * (one * normal).total(length)
            for one, normal in zip((predicted, corrected), norms, strict=True)
        )
        router = declared.prediction_variance * at_p + declared.correction_variance * at_c
        scale = count * declared.router_variance / width
        result = {
            "streams.router": count / width * router,
            "streams.prediction": scale * at_p,
            "streams.correction": scale * at_c,
        }
        return result | self._per_layer(body.output, run)

    def _passed(self, place: int, run: Run) -> tuple[Array, Array]:
        """Amplitudes in which the layers behind number `place` pass on x_0, and a small change of
        x_0 along itself: a norm that is added (`laurel`) does not change with its input's size."""
        others, carried = run.kept[GRADIENT], run.kept[CARRIED, place]
        along: Array = 1.0
        for n in range(place, self.model.layers):
            amplitude = ratio_or_zero(run.kept[CARRIED, n], carried)
            share = amplitude * amplitude * run.kept[place].kernel.diagonal
            share = ratio_or_zero(share, run.kept[n].kernel.diagonal)
            grown = ratio_or_zero(run.kept[CARRIED, n + 1], run.kept[CARRIED, n])
            skips = float(np.prod(self.model.by_block("skip_scale")[n]))
            along = along * (grown - (grown - skips) * share)
        return ratio_or_zero(others.carried, carried), along

    def _per_layer(self, signal: Signal, run: Run) -> Values:
        """The same of the block of per-layer embeddings, whose input is zero: so are all gradients
        but that of its gain, which the norm behind the block divides by the root of epsilon."""
        model, declared = self.model, self.model.per_layer_embedding
        if declared is None:
            return {}
        of_rows = rows(model).propagate(signal, Run(layer=self.number, kept=run.kept)).output
        entrywise = activation_laws(model.activation).entrywise
        assert entrywise is not None
        slope = float(entrywise[1](FLOAT, 0.0)) ** 2
        gain = signal.width**2 * slope * declared.width / model.norm_epsilon
        gain *= declared.gate_variance * declared.output_variance * (self.declared.streams - 1)
        gradient = run.kept[GRADIENT].gradient * of_rows.kernel * signal.kernel
        zero = [f"per_layer_{name}" for name in ("gate", "projection", "output", "table")]
        if model.norm_affine:
            zero += ["per_layer.context.gain", "per_layer.post_norm.gain"]
        return {"per_layer.gain": gain * gradient.total(signal.seq_len)} | dict.fromkeys(zero, 0.0)

    def amplitude_of_input(self, record: Record, amplitude: Array) -> Array:
        inner = self.body.amplitude_of_input(record.children[0], amplitude)
        last = self.number == self.model.layers
        return inner / self.declared.streams if last else inner

    def stream_row(self, record: Record) -> dict[str, Any]:
        """A row of `Prediction.streams`."""
        x, (_, carried, (e, u)) = record.children[0].output.kernel, record.pullback
        other = x + u + e - crossed(e, carried)
        common = x.diagonal - carried * e.diagonal
        likeness = ratio_or_zero(common, np.sqrt(x.diagonal * other.diagonal))
        means = map(x.average, (x.diagonal, other.diagonal, likeness))
        names = "variance", "other_variance", "likeness"
        return {"layer": record.layer} | dict(zip(names, map(float, means), strict=True))


def _size(kernel: Kernel) -> Array:
    return np.sqrt(kernel.diagonal)


def _at_first(kernel: Kernel, factor: Array) -> Kernel:
    """Multiply by a factor of the first token."""
    return kernel.weighted(factor, kernel.over_tokens(factor)[0])


def _at_second(kernel: Kernel, factor: Array) -> Kernel:
    """Multiply by a factor of the second token."""
    return kernel.weighted(factor, kernel.over_tokens(factor)[1])


def _other(kernel: Kernel, carried: Array, run: Run) -> Kernel:
    """Kernel of x_i, from that of x_0."""
    e, u = run.kept[BEGIN]
    begin: Kernel = u + e - crossed(e, carried)
    return kernel + begin


def _rescaled(model: Transformer, name: str) -> Chain:
    """The matrices to or from streams other than the first, and the division by their outputs'
    sizes."""
    declared = model.streams
    assert isinstance(declared, AltUp)
    parameters = {
        "fan_in": model.d_model,
        "fan_out": (declared.streams - 1) * model.d_model,
        "weight_variance": getattr(declared, f"{name}_variance"),
    }
    linear = Linear(
        LINEAR, "refined", f"streams.{name}", parameters, model.d_model, f"streams.{name}"
    )
    return Chain((linear, FiniteNormalization(RMSNORM, "", LEAST, centres=False)))
