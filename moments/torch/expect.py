"""Expected ranges of the metrics of the first step, under the names that training loops log."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from torch import nn

from ..errors import without_warnings
from ..noise.band import NORMAL_95
from ..prediction.predict import predict
from ..prediction.result import Prediction
from ..show.expected import TOLERANCE, Expected, one_draw
from ..show.health import call_factory, declared
from ..show.verdict import class_count
from .batches import completed, inputs_of
from .check import Checking
from .checkpoints import opened
from .diagnose import Text, arrays_of
from .measure import Loss
from .roles import ModuleRoles
from .running import as_named, batch_on_cpu

Range = tuple[float, float]

LOSS = (
    "loss/train/total",
    "lm loss",
    "loss_metrics/global_avg_loss",
    "train/loss",
    "train/CE loss",
    "lm_loss",
    "loss",
)
"""Names of the loss: Composer, Megatron, torchtitan, Trainer of transformers on W&B, OLMo-core,
nanotron, and plain."""

GRADIENT = (
    "l2_norm/grad/global",
    "grad-norm",
    "grad_norm",
    "train/grad_norm",
    "grad_2.0_norm_total",
    "optim/total grad norm",
)
"""Names of the norm of all gradients: Composer's OptimizerMonitor, Megatron, torchtitan and
nanotron, Trainer of transformers on W&B, Lightning's grad_norm, OLMo-core."""

WEIGHTS = 0.1
"""Relative standard deviation of the error of a matrix's predicted squared gradient norm, from
whole models in `docs/accuracy.md`."""


FEW = (".bias", ".gain", "query", "key", "value", "output")
"""Ends of roles whose gradients have about d_model degrees of freedom: a sum over tokens."""


def expect(subject: Any, batch: Any = None, *, loss: Loss | None = None) -> dict[str, Range]:
    """Ranges of the metrics of the first step, under the names of common loggers.

    Names: `l2_norm/grad/NAME`, `l2_norm/grad/global` and `activations/l2_norm/PATH_input.0` of
    Composer's monitors; `lm loss` and `grad-norm` of Megatron;
    `loss_metrics/global_avg_loss` and `grad_norm` of torchtitan; `train/CE loss` and `optim/total
    grad norm` of OLMo-core; `lm_loss` and `grad_norm` of nanotron; `grad_2.0_norm/NAME` and
    `grad_2.0_norm_total` of Lightning's `grad_norm`; `gradients/NAME`, of W&B's `watch`, as the
    root mean square of its histogram; `massive_act/layer_N/activation_rms` and
    `grad_health/layer_N/layer_out_rms`, also with `_global`, of llm-internal-medicine, layers from
    0.

    Args:
        subject: an nn.Module, or a function that makes one; or a Transformer or anything else that
            `moments.check` accepts for one, with ranges of loss, whole gradient and layers.
        batch: one batch of the run, of its full size: gradients shrink with it.
        loss: as in `moments.torch.measure`.

    Returns:
        Name -> (low, high), the range of 95 % of correct draws. Gradients, before any clipping, are
        those of matrices and tables, if the module's loss and the band of one draw are predicted.

    Raises:
        DomainError: an argument out of range.
        MomentsError: a module that cannot be read or run.
    """
    subject, own_batch = call_factory(subject)
    batch = own_batch if batch is None else batch
    known = declared(subject)
    if known is not None:
        with without_warnings():
            prediction = predict(known[0], **inputs_of(known[0], arrays_of(batch or {})))
        return {**dict(_outputs(prediction)), **dict(_layers(prediction))}
    if not isinstance(subject, nn.Module):
        subject = opened(subject)
    checking = Checking(subject, batch_on_cpu(as_named(subject, batch)), None, loss)
    prediction = _at_full_size(checking, batch, loss)
    return {
        **dict(_outputs(prediction)),
        **dict(_layers(prediction)),
        **dict(_streams(checking, prediction)),
        **dict(_gradients(subject, checking.roles, prediction)),
    }


def _at_full_size(checking: Checking, batch: Any, loss: Loss | None) -> Prediction:
    """The prediction for the whole batch; a check uses a part of it."""
    prediction = checking.comparison.prediction
    model = checking.described
    if batch is None or "token_ids" not in checking.case.inputs:
        return prediction
    batch = completed(checking.module, batch_on_cpu(as_named(checking.module, batch)))
    arrays = arrays_of(batch)
    length = next((np.shape(v)[1] for v in arrays.values() if np.ndim(v) >= 2), model.seq_len)
    model = model.replace(seq_len=int(length))
    text = Text.of(checking.module, model, batch, loss or checking.inputs.loss)
    inputs = inputs_of(model, text.arrays)
    if text.targets is not None:
        inputs["targets"] = text.targets
    with without_warnings():
        return predict(model, **inputs)


def _band(mean: float, spread: float) -> Range:
    """The range of a norm whose square is log-normal, of this mean and relative deviation."""
    square = Expected(np.asarray(mean), np.sqrt(np.log1p(spread**2)))
    return math.sqrt(square.low), math.sqrt(square.high)


def _spread(deviation: float, error: float) -> float:
    """Relative standard deviation of a log-normal draw with that of the logarithm, and of the error
    of its predicted mean."""
    return math.hypot(math.sqrt(math.expm1(deviation**2)), error)


def _outputs(p: Prediction) -> Iterator[tuple[str, Range]]:
    """Ranges of the loss and of the whole gradient."""
    if p.loss is None:
        return
    if (vocabulary := class_count(p.model)) is not None:
        value = float(p.loss)
        tolerance = TOLERANCE * abs(value - math.log(vocabulary))
        half = NORMAL_95 * math.hypot(float(p.loss_stderr or 0.0), tolerance)
        for name in LOSS:
            yield name, (value - half, value + half)
    if (whole := _together(_squares(p).values())) is not None:
        for name in GRADIENT:
            yield name, whole


def _together(squares: Collection[tuple[float, float]]) -> Range | None:
    """The range of a norm from squared norms of its parts with their relative deviations; None if
    all are 0."""
    total = sum(square for square, _ in squares)
    if total <= 0:
        return None
    return _band(total, sum(square * deviation for square, deviation in squares) / total)


def _squares(p: Prediction) -> dict[tuple[int, str], tuple[float, float]]:
    """Expected squared gradient norm by layer and role, with its relative deviation over draws.

    The gradient of a weight varies as that of the stream in its layer. Gradients of vectors, and of
    matrices behind an average of attention over tokens, have only about d_model degrees of freedom:
    the relative variance of their square is 2 / d_model more.
    """
    with without_warnings():
        frame = p.weight_gradients()
    if frame.attrs.get("sequences", 1) != frame.attrs.get("batch", 1):
        return {}
    if (ranges := one_draw(p).get("grad_variance")) is None:
        return {}
    deviation, last = ranges.deviation, p.model.layers
    rows: dict[tuple[int, str], tuple[float, float]] = {}
    for row in frame.to_dict("records"):
        layer, name = int(row["layer"]), str(row["weight"])
        variance = math.expm1(float(deviation[min(max(layer, 0), last)]) ** 2)
        variance += 2 / p.model.d_model if name.endswith(FEW) else 0.0
        square = rows.get((layer, name), (0.0, 0.0))[0] + float(row["squared_norm"])
        rows[layer, name] = square, math.sqrt(variance + WEIGHTS**2)
    return rows


def _layers(p: Prediction) -> Iterator[tuple[str, Range]]:
    """Ranges of root mean squares of every layer's input and of its output's gradient."""
    with without_warnings():
        ranges = one_draw(p)
    if (signal := ranges.get("variance")) is not None:
        for layer, variance in enumerate(p.variance[:-1]):
            spread = _spread(float(signal.deviation[layer]), TOLERANCE)
            yield f"massive_act/layer_{layer}/activation_rms", _band(float(variance), spread)
    if p.loss is None or (gradient := ranges.get("grad_variance")) is None:
        return
    for layer, variance in enumerate(p.grad_variance[1:]):
        band = _band(float(variance), _spread(float(gradient.deviation[layer + 1]), WEIGHTS))
        yield f"grad_health/layer_{layer}/layer_out_rms", band
        yield f"grad_health/layer_{layer}/layer_out_rms_global", band


def _streams(checking: Checking, p: Prediction) -> Iterator[tuple[str, Range]]:
    """Ranges of the mean norm of a token between layers, at submodules that give the stream."""
    ranges = one_draw(p).get("variance")
    if ranges is None:
        return
    points = [point for point in checking.reading.sites or () if point.site == "stream"]
    paths = {point.layer: point.path for point in points if point.side == "output"}
    for layer in range(p.model.layers):  # the output of layer n is the input of layer n + 1
        path = paths.get(layer + 1)
        if path is None:
            continue
        variance = float(p.variance[layer])
        size = math.sqrt(variance * p.model.d_model)
        rows = None if p.token_variance is None else p.token_variance[layer]
        if rows is not None and variance > 0:  # the mean norm is below the root mean square
            size *= float(np.mean(np.sqrt(np.maximum(rows, 0.0)))) / math.sqrt(float(np.mean(rows)))
        size *= 1 - 1 / (4 * p.model.d_model)  # E|x| of d normal entries, to leading order
        spread = math.hypot(float(ranges.deviation[layer]), TOLERANCE) / 2
        low, high = (size * math.exp(end * NORMAL_95 * spread) for end in (-1, 1))
        yield f"activations/l2_norm/{path}_input.0", (low, high)


def _gradients(module: nn.Module, roles: ModuleRoles, p: Prediction) -> Iterator[tuple[str, Range]]:
    """Ranges of the gradient of every matrix and table, all its roles together."""
    if p.loss is None:
        return
    rows = _squares(p)
    own: dict[str, list[tuple[float, float] | None]] = {}
    for role in roles.roles:
        own.setdefault(role.parameter, []).append(rows.get((role.layer, role.full_name)))
    for name, parameter in module.named_parameters():
        parts = own.get(name, [None])
        if parameter.ndim < 2 or not parameter.requires_grad or None in parts:
            continue
        band = _together([part for part in parts if part is not None])
        if band is None:
            continue
        yield f"l2_norm/grad/{name}", band
        yield f"grad_2.0_norm/{name}", band
        (low, high), root = band, math.sqrt(parameter.numel())
        yield f"gradients/{name}", (low / root, high / root)
