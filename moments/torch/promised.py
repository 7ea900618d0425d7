"""Checks of modules whose config says what they are, and whose code reads as no alike layers.

Layers are the entries of the one list of submodules that is as long as the config's stack. What
enters and leaves them is compared with the prediction of the config; matrices against the variances
that it declares, and against their namesakes in other layers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..errors import MomentsError, without_warnings
from ..model.embedding import Embedding
from ..model.huggingface.config import from_huggingface
from ..model.transformer import Transformer
from ..prediction.draws import STREAM, WeightGradient
from ..prediction.measurement import Measurement
from ..prediction.predict import predict
from ..show.comparison import Comparison, compare
from ..show.findings import Finding, Report
from ..show.health import Seen, first_off, rules, stream_numbers
from .alike import lists_of, odd_namesakes
from .batches import MOST_TOKENS, SEQUENCES, batch_shape, completed, shortened
from .dataflow.reading import recorded
from .diagnose import Text, at_length, case_of
from .entries import EntryMoments
from .measure import Loss, measure
from .open_check import NotRead, why_not
from .roles import HookPoint, WeightPart, gathered_names

FAR = 6.0
"""Standard deviations, beyond band and tolerance, from which a point is a finding, not chance."""

LEAST = 8
"""Rows and columns from which a parameter counts as a matrix that the config's rule draws."""

NEAR = 0.05
"""Relative error of a variance that is granted to a matrix, beside its scatter."""


def check_promised(
    module: nn.Module, batch: Any, promised: Transformer, loss: Loss | None, refusal: NotRead
) -> Report:
    """`moments.check` by the config alone.

    Raises:
        MomentsError: not a text of one stack, no list of submodules that are its layers, or it
            does not run.
    """
    if not isinstance(promised.embedding, Embedding) or promised.encoder is not None:
        raise MomentsError("a config of no single stack over token ids")
    random = batch is None
    if random:
        generator = torch.Generator().manual_seed(0)
        size = (1, min(MOST_TOKENS, promised.seq_len))
        ids = torch.randint(promised.embedding.vocab_size, size, generator=generator)
        batch = {"input_ids": ids}
    batch = shortened(batch, SEQUENCES, MOST_TOKENS)
    batch = completed(module, batch) if loss is None else batch
    path = _layers(module, batch, promised)
    measurement = _measured(module, batch, loss, path, promised)
    model = at_length(promised, measurement)
    text = Text.of(module, model, batch, loss)
    case, _ = case_of(model, text, measurement, None)
    with without_warnings():
        prediction = predict(case.model, **case.inputs)
        comparison = compare(prediction, measurement)
    names = {"token": _table(module)}
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    more, notes = rules(Seen(prediction, comparison, names, model, dtype))
    left = _left_out(module, model.seq_len)
    findings = [
        *refusal.findings,
        *odd_namesakes(module),
        *_off(module, promised),
        *_mismatch(comparison, path, left),
    ]
    kinds = {finding.kind for finding in findings}
    findings += [finding for finding in more if finding.kind not in kinds]
    return Report(
        source=type(module).__name__,
        scheme="compared with the initialisation that its config promises",
        findings=tuple(findings),
        notes=(*left, *notes),
        unchecked=(
            f"which matrix is which, sums and norms within its layers ({why_not(refusal)}): they "
            "are compared with the config's prediction of what leaves each layer",
        ),
        rows=tuple(stream_numbers(prediction, comparison)),
        model=model,
        prediction=prediction,
        comparison=comparison,
        read=f"measured on {batch_shape(batch)}" + (" of random input" if random else ""),
    )


def _layers(module: nn.Module, batch: Any, promised: Transformer) -> str:
    """The list of as many submodules that the batch reaches, and that give d_model features."""
    graph, _ = recorded(module, batch, rows=1)
    lists = [
        layers[0].path.rpartition(".")[0]
        for layers in lists_of(module, graph)
        if len(layers) == promised.layers
        and graph.tensor(layers[-1].made).shape[-1] == promised.d_model
    ]
    outer = [p for p in lists if not any(p.startswith(f"{other}.") for other in lists)]
    if len(outer) != 1:
        raise MomentsError(f"{len(outer)} lists of {promised.layers} submodules")
    return outer[0]


def _measured(
    module: nn.Module, batch: Any, loss: Loss | None, path: str, promised: Transformer
) -> Measurement:
    points = [HookPoint(0, STREAM, f"{path}.0", "input")]
    points += [HookPoint(n + 1, STREAM, f"{path}.{n}", "output") for n in range(promised.layers)]
    rows = [
        (WeightGradient(0, name, name), WeightPart(name, name))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    return measure(module, batch, loss=loss, parts=(tuple(points), rows))


def _table(module: nn.Module) -> tuple[str, ...]:
    tables = [f"{p}.weight" for p, part in module.named_modules() if isinstance(part, nn.Embedding)]
    return tuple(tables[:1])


def _declared(promised: Transformer) -> set[float]:
    """Every variance that the config declares, of whatever matrix."""
    given = promised.to_dict()
    parts = [given.get(part) for part in ("weights", "embedding", "head", "mixer", "ffn")]
    return {float(v) for v in tree_leaves(parts) if type(v) in (int, float) and v > 0}


def _off(module: nn.Module, promised: Transformer) -> Iterator[Finding]:
    """Matrices whose variance is none of those that the config declares."""
    values = _declared(promised)
    off: dict[float, list[tuple[str, EntryMoments]]] = {}
    for path, part in module.named_modules():
        if not isinstance(part, nn.Linear) or min(part.weight.shape) < LEAST:
            continue
        moments = EntryMoments.of(part.weight)
        ratio = {v: moments.square / v for v in values}
        granted = NEAR + FAR * moments.spread if moments.square else 0.0
        if all(abs(r - 1) > granted for r in ratio.values()):
            nearest = min(values, key=lambda v: abs(math.log(ratio[v])) if ratio[v] else v)
            off.setdefault(nearest, []).append((f"{path}.weight", moments))
    for expected, rows in off.items():
        first = rows[0][1].square
        why = (
            f"the variance is {first:.3g}, {first / expected:.3g} times the nearest that the "
            "config declares of any matrix"
            if first
            else "all entries are 0, where the config draws every matrix"
        )
        names = gathered_names([name for name, _ in rows])
        mend = "draw it as the config says, or declare in the config what was meant"
        yield Finding("error", "wrong variance", names, (), first, expected, why, mend)


def _left_out(module: nn.Module, seq_len: int) -> list[str]:
    """Entries of its config that its declaration does not model, in the reader's words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from_huggingface(module.config, seq_len=seq_len)
    notes = (str(warning.message) for warning in caught)
    return [note for note in dict.fromkeys(notes) if "is not modelled" in note]


def _mismatch(comparison: Comparison, path: str, left: list[str]) -> Iterator[Finding]:
    """Points of the stream that the config does not give; a note where it is not all modelled."""
    points = comparison.outliers(FAR)
    embedding = comparison.prediction.model.embedding
    if embedding is not None and embedding.norm:  # which its first layer may begin with
        points = points[points["layer"] > 0]
    if not len(points):
        return
    layer, measured, predicted, why = first_off(points, "config's initialisation gives")
    of = (f"{path}.{max(layer - 1, 0)}",), (layer,) if layer else (), measured, predicted, why
    mend = "look at that layer's matrices, its sums, scales and norms"
    yield Finding("note" if left else "warning", "not what its config gives", *of, mend)
