"""`moments.check` of a module that no Transformer describes: by its config, or by its operations.

By operations, what its submodules give is compared with what its parameters' variances predict, its
tensors with their like in other layers, and the gradient's way through its layers is looked at.
Where a config says what it is, layers are the entries of the one list of submodules that is as long
as the config's stack: what enters and leaves them is compared with the prediction of the config,
matrices with the variances that it declares and with their namesakes in other layers.
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import MomentsError, without_warnings
from ..model.embedding import Embedding
from ..model.huggingface.config import from_huggingface
from ..model.transformer import Transformer
from ..prediction.draws import STREAM, WeightGradient
from ..prediction.measurement import Measurement
from ..prediction.predict import predict
from ..show.comparison import Comparison, compare
from ..show.findings import Finding, Report, Row, ranked
from ..show.health import GRADIENT, Seen, first_off, rules, stream_numbers
from .alike import differences, lists_of, odd_namesakes
from .batches import MOST_TOKENS, SEQUENCES, batch_shape, completed, shortened
from .checkpoints import redrawn
from .dataflow.graph import SELECTIONS, VIEWS, Graph
from .dataflow.reading import random_part, recorded
from .diagnose import Text, at_length, case_of
from .entries import EntryMoments
from .measure import Loss, measure
from .operations.laws import F64
from .operations.predict import Lowered, ModulePrediction, lowered, summary
from .operations.sampling import again
from .roles import HookPoint, WeightPart, gathered_names

DRAWS = 24
"""Of what has no law."""

APART = {"mean square": 4.0, "gradient variance": 32.0}
"""Factor of one draw's number from the prediction beyond which it is a finding. Over 36 draws of
three modules of width 96 the largest are 1.5 and 2.6; where experts of width 64 read tokens that
are nearly alike, 2.3 and 17 in 5 draws."""

DEVIATIONS = 4.0
"""Of `OperationRow.scatter`, where few features or tokens that are alike give more than that."""

CHOOSING = SELECTIONS | {"argmax", "max"}
"""Operations by which tokens choose experts."""

SIGNIFICANT = 1e-12
"""Mean square below which what a submodule gives counts as nothing, and is not judged."""


def check_open(module: nn.Module, batch: Any, refusal: NotRead) -> Report:
    """Of a module that could not be read, for the reasons of the refusal.

    Raises:
        NotRead: the same, where it cannot be followed by operations either.
    """
    if any(finding.kind == "entries not finite" for finding in refusal.findings):
        raise refusal
    try:
        return report_of(module, batch, refusal)
    except (MomentsError, RuntimeError) as error:
        said = f"{refusal}; and its operations could not be followed ({error})"
        raise NotRead(said, ()) from None


def report_of(
    module: nn.Module, batch: Any, refusal: NotRead, wider: Mapping[str, Any] | None = None
) -> Report:
    """The same; with `wider`, as of `lowered`, nothing is measured."""
    done, loss = _followed(module, batch, wider)
    prediction = summary(done, DRAWS)
    gradients = {} if wider else _gradients(done, loss)
    chosen = _chosen(done, prediction, gradients)
    rows = list(_rows(done, prediction, gradients, chosen)) if not wider else []
    findings = [*refusal.findings, *differences(module, done.graph, done.ids, done.end)]
    findings += _unlike(rows)
    findings += [*_growth(prediction), *_way(prediction)]
    weights = [] if wider else drawn_rows(module)
    findings += _off(weights)
    notes = [*_layers(prediction), *_idle(done, loss), *prediction.notes]
    drawn = f"{sum(prediction.sampled.values())} operations without a law, which were drawn"
    unread = [f"{name} ({why})" for name, why in prediction.unread]
    return Report(
        source=type(module).__name__,
        scheme="no stack of alike layers, of which a scheme could be recognised"
        + "; its parameters are compared with what their classes draw" * bool(weights),
        findings=tuple(findings),
        notes=tuple(notes),
        unchecked=(
            f"{'a scheme' if weights else 'what its initialisation is meant to be'} "
            f"({why_not(refusal)})",
            *((drawn,) if prediction.sampled else ()),
            *(("gradients inside experts, which depend on what tokens chose",) if chosen else ()),
            *(f"what stands behind {words}" for words in unread),
        ),
        rows=(*rows, *weights),
        read=f"followed operation by operation on {prediction.tokens} tokens of "
        f"{'random input' if batch is None else 'the batch'}",
    )


def why_not(refusal: NotRead) -> str:
    """Why it was not read as a stack of layers."""
    return str(refusal).splitlines()[0].partition(IN_ANY_CASE)[0]


def _followed(
    module: nn.Module, batch: Any, wider: Mapping[str, Any] | None
) -> tuple[Lowered, str | None]:
    """With the cross-entropy of the next token where it gives logits, else any gradient."""
    try:
        return lowered(module, batch, "cross-entropy", wider=wider, scalars=False), "cross-entropy"
    except MomentsError:
        return lowered(module, batch, wider=wider, scalars=False), None


def _gradients(done: Lowered, loss: str | None) -> dict[int, Tensor]:
    """Gradients of the recorded pass, by value; of the loss, or of one draw at the output."""
    graph, values = done.graph, {}
    for number, value in enumerate(graph.values):
        if value.producer is None and value.params and value.tensor.is_floating_point():
            values[number] = value.tensor.detach().clone().requires_grad_(True)
    kept: dict[int, Tensor] = dict(values)
    with torch.enable_grad():
        for node in graph.nodes:
            for output, tensor in zip(node.outputs, again(graph, node, values, {}), strict=False):
                if tensor.requires_grad:
                    tensor.retain_grad()
                    kept[output] = tensor
        end = values[done.end]
        if loss is None:
            random = torch.Generator().manual_seed(0)
            end.backward(torch.randn(end.shape, generator=random).to(end.dtype))
        else:
            ids = done.ids
            assert ids is not None
            logits, targets = end[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
            nn.functional.cross_entropy(logits, targets).backward()
    return {n: t.grad for n, t in kept.items() if t.grad is not None}


def _rows(
    done: Lowered,
    prediction: ModulePrediction,
    gradients: Mapping[int, Tensor],
    chosen: Collection[str],
) -> Iterator[Row]:
    for row in prediction.outputs:
        x = done.graph.tensor(row.value).to(F64)
        expected, measured = row.variance + row.mean**2, float(x.square().mean())
        yield _row(row.module, "mean square", expected, measured, row.scatter)
        g = gradients.get(row.value)
        if row.grad_variance and g is not None:
            seen = float(g.to(F64).square().mean())
            judged = _row(row.module, "gradient variance", row.grad_variance, seen, row.scatter)
            free = _namesakes(row.module) in chosen
            yield dataclasses.replace(judged, passed=None) if free else judged


def _chosen(
    done: Lowered, prediction: ModulePrediction, gradients: Mapping[int, Tensor]
) -> set[str]:
    """Submodules, with their namesakes, that some tokens choose: experts, whose gradient in one
    pass is what this pass chose. The first token has one key, and the last no next token: a third
    one without a gradient chose another expert."""
    if not any(node.name in CHOOSING for node in done.graph.nodes):
        return set()
    of = {row.module: gradients.get(row.value) for row in prediction.outputs}
    few = (n for n, g in of.items() if g is not None and int((g == 0).all(-1).sum()) > 2)
    return {_namesakes(name) for name in few}


def _namesakes(path: str) -> str:
    """A path without the last number in it."""
    return re.sub(r"(^|\.)\d+(?=(\.[^\d.][^.]*)*$)", r"\1*", path)


def _row(path: str, quantity: str, expected: float, measured: float, scatter: float) -> Row:
    if expected <= SIGNIFICANT and measured <= SIGNIFICANT:
        return Row(0, "", path, quantity, expected, measured, None)
    apart = max(APART[quantity], math.exp(DEVIATIONS * scatter))
    inside = expected > 0 and 1 / apart <= measured / expected <= apart
    band = expected / apart, expected * apart
    return Row(0, "", path, quantity, expected, measured, inside, low=band[0], high=band[1])


def _unlike(rows: list[Row]) -> Iterator[Finding]:
    """The first submodules whose numbers are none of what their parameters give."""
    for quantity in APART:
        failed = [row for row in rows if row.quantity == quantity and row.passed is False]
        if not failed:
            continue
        names = gathered_names([row.parameter or "the module" for row in failed])
        first = failed[0]
        times = first.ratio
        yield Finding(
            "warning",
            f"unlike its parameters: {quantity}",
            names,
            (),
            first.measured,
            first.expected,
            f"the {quantity} of what {first.parameter or 'the module'} gives is {times:.3g} times "
            "what independent entries of its parameters' variances give",
            "look for copies of one tensor, rows of unlike size, hooks that change what it gives",
        )


def _stack(prediction: ModulePrediction) -> list[Any]:
    """Rows of the longest list of submodules that have parts of their own, in order; not of a list
    inside another, such as a layer's experts."""
    lists: dict[str, list[Any]] = {}
    whole = {row.module.rpartition(".")[0] for row in prediction.outputs}
    for row in prediction.outputs:
        parent, _, last = row.module.rpartition(".")
        if last.isdigit() and row.module in whole and row.correlation is not None:
            lists.setdefault(parent, []).append(row)
    lists = {f"{parent}." if parent else "": rows for parent, rows in lists.items() if rows[1:]}
    outer = (
        rows
        for name, rows in lists.items()
        if not any(name != other and name.startswith(other) for other in lists)
    )
    return max(outer, key=len, default=[])


def _way(prediction: ModulePrediction) -> Iterator[Finding]:
    """Whether the gradient keeps its size relative to the signal through the layers."""
    rows = [row for row in _stack(prediction) if row.grad_variance and row.variance > 0]
    if len(rows) < 2:
        return
    first, last = (float(row.variance * row.grad_variance) for row in (rows[0], rows[-1]))
    ratio = first / last
    if 1 / GRADIENT <= ratio <= GRADIENT:
        return
    way = "vanishes" if ratio < 1 else "explodes"
    yield Finding(
        "warning",
        f"gradient {way}",
        (rows[0].module, rows[-1].module),
        (),
        ratio,
        math.nan,
        f"the gradient {way} towards the input: times the signal's variance it is {ratio:.2g} "
        f"times at {rows[0].module} what it is at {rows[-1].module}",
        "scale what blocks add by their number, or normalise what they read",
    )


def _growth(prediction: ModulePrediction) -> Iterator[Finding]:
    """Whether the variance more than doubles with every layer of the later half, over all of which
    equal branches double it at most."""
    rows = _stack(prediction)
    later = rows[(len(rows) - 1) // 2 :]
    if len(later) < 3 or not min(row.variance for row in later) > 0:
        return
    factor = float(later[-1].variance / later[0].variance) ** (1 / (len(later) - 1))
    last = float(later[-1].variance / later[-2].variance)
    if factor > 2 and last > min(3, 0.9 * factor):  # sums of all earlier streams: (n + 1)^2 / n^2
        yield Finding(
            "warning",
            "variance explodes",
            (later[0].module, later[-1].module),
            (),
            factor,
            math.nan,
            f"the variance grows {factor:.3g} times with every layer from {later[0].module} to "
            f"{later[-1].module}, where branches of one size add up to 2 times over all of them",
            "look for an input that is added twice, or a branch that reads what is not normalised",
        )


def _layers(prediction: ModulePrediction) -> Iterator[str]:
    """What the longest list of submodules does to its signal."""
    rows = _stack(prediction)
    if len(rows) > 1:
        one, other = rows[0], rows[-1]
        yield (
            f"from {one.module} to {other.module} the variance goes from {one.variance:.3g} to "
            f"{other.variance:.3g}, the correlation of tokens from {one.correlation:.2f} to "
            f"{other.correlation:.2f}"
        )


def _idle(done: Lowered, loss: str | None) -> Iterator[str]:
    """Matrices that receive no gradient in the first step."""
    squares = done.weights
    shapes = {v.name: v.tensor.ndim for v in done.graph.values if v.params}
    idle = [name for name, square in squares.items() if square == 0 and shapes.get(name, 0) > 1]
    if idle and len(idle) < len(squares):
        yield f"no gradient reaches {', '.join(gathered_names(idle))} in the first step"


# --- recurrences ----------------------------------------------------------------------------------

# State-space layers and gated linear attention multiply a state by exp(-step A) at every token,
# with step = softplus(x + b) and A > 0 a parameter. Steps are drawn between .001 and .1 (Gu and Dao
# 2023, arXiv:2312.00752, section 3.6); a bias b of ones or zeros forgets the state at once.

_PASSING = (*VIEWS, "clamp", "clamp_min", "clamp_max", "repeat", "repeat_interleave", "index")


class Recurrence(NamedTuple):
    """One recurrence: the bias of its step, the number that all its entries are (None where they
    differ), the smallest and largest step, and the tokens after which the longest memory is down to
    1/e.
    """

    bias: str
    alike: float | None
    steps: tuple[float, float]
    memory: float


def recurrences(graph: Graph) -> Iterator[Recurrence]:
    """Of one recorded pass."""
    for node in graph.nodes:
        if node.name != "softplus" or not graph.values[node.outputs[0]].live:
            continue
        bias = _bias(graph, node.inputs[0])
        decay = _decay(graph, node.outputs[0])
        if bias is None or decay is None:
            continue
        entries = graph.tensor(bias).detach().double().flatten()
        steps = graph.tensor(node.outputs[0]).detach().double()
        same = entries.numel() > 1 and float(entries.max() - entries.min()) <= 1e-6
        yield Recurrence(
            str(graph.values[bias].name),
            float(entries[0]) if same else None,
            (float(steps.min()), float(steps.max())),
            float(1 / (-decay).clamp(min=1e-12).min()),
        )


def _bias(graph: Graph, value: int) -> int | None:
    """The parameter that was added to a value on its way."""
    node = graph.producer(value)
    while node is not None:
        for other in node.inputs:
            constant, leaf, name = graph.values[other], _leaf(graph, other), node.name.rstrip("_")
            adds = name == "add" or (name == "addmm" and node.inputs[0] == other)
            if not constant.live and constant.params and leaf is not None and adds:
                return leaf
        if node.name not in _PASSING or not node.inputs:
            return None
        node = graph.producer(node.inputs[0])
    return None


def _leaf(graph: Graph, value: int) -> int | None:
    """The parameter that a constant is, or is a view or a copy of."""
    whole = [leaf for leaf in graph.leaves(value) if graph.values[leaf].name]
    viewed = all(node.name in VIEWS for node in graph.ancestor_nodes(value))
    return whole[0] if viewed and len(whole) == 1 else None


def _decay(graph: Graph, steps: int) -> Tensor | None:
    """Logarithms of what the state keeps per token: steps times a negative constant."""
    waiting, seen = [steps], set()
    while waiting:
        value = waiting.pop()
        for index in graph.values[value].consumers:
            node = graph.nodes[index]
            if index in seen:
                continue
            seen.add(index)
            rest = [v for v in node.inputs if v != value]
            if node.name.rstrip("_") == "mul" and len(rest) == 1:
                rate = graph.values[rest[0]]
                if not rate.live and rate.params and bool((rate.tensor < 0).all()):
                    return graph.tensor(node.outputs[0]).detach().double()
            if node.name in _PASSING:
                waiting += node.outputs
    return None


# --- what is not read -----------------------------------------------------------------------------

REMEMBERED = 4.0
"""Tokens that a state has to remember to be more than the convolution of four before it."""


IN_ANY_CASE = "; wrong in any case: "
"""Before what is wrong with a module that is refused."""


class NotRead(MomentsError):
    """A module that `moments.check` cannot describe.

    Attributes:
        findings: what is wrong with it nonetheless.
    """

    def __init__(self, why: str, findings: tuple[Finding, ...] = ()) -> None:
        line, *rest = why.split("\n", 1)
        said = "".join(f"{IN_ANY_CASE}{finding}" for finding in findings)
        super().__init__("\n".join([line + said, *rest]))
        self.findings = findings


def not_read(module: nn.Module, batch: Any, why: str) -> NotRead:
    """The refusal of a module, with what is found in it all the same."""
    try:
        graph, given = recorded(module, batch)
        result = [*_forgetting(list(recurrences(graph)))]
        result += random_outcome(random_part(module, given))
    except Exception:  # a refusal does not fail over what it could add
        result = []
    return NotRead(why, ranked(result))


def _forgetting(result: list[Recurrence]) -> Iterator[Finding]:
    short = [r for r in result if r.memory < REMEMBERED]
    if not short:
        return
    worst = min(short, key=lambda r: r.memory)
    low, high = min(r.steps[0] for r in short), max(r.steps[1] for r in short)
    same = {r.alike for r in short}
    alike = f"all entries are {worst.alike:g}: " if len(same) == 1 and None not in same else ""
    names, longest = gathered_names([r.bias for r in short]), max(r.memory for r in short)
    why = (
        f"{alike}steps of the recurrence lie between {low:.2g} and {high:.2g}, and the state that "
    )
    why += f"remembers longest is down to 1/e after {longest:.2g} tokens"
    mend = (
        "draw steps log-uniformly between .001 and .1 and set the bias to the inverse of softplus"
    )
    yield Finding("warning", "forgetting", names, (), longest, REMEMBERED, why, mend)


def random_outcome(path: str | None) -> Iterator[Finding]:
    """What is wrong where a submodule draws random numbers in evaluation mode."""
    if path is not None:
        yield Finding(
            "error",
            "dropout left on",
            (path,),
            reason=f"in evaluation mode {path} draws random numbers: dropout, or another draw, "
            "acts where it should not",
            mend="pass training=self.training to functional.dropout (dropout_p = p if "
            "self.training else 0 to scaled_dot_product_attention), or use nn.Dropout",
        )


# --- by its config --------------------------------------------------------------------------------


FAR = 6.0
"""Standard deviations, beyond band and tolerance, from which a point is a finding, not chance."""

LEAST = 8
"""Entries below which the mean square of a parameter says little."""

NEAR = 0.05
"""Relative error of a variance that is granted to a parameter, beside its scatter."""

ALIKE = 0.1
"""Relative difference of factors up to which parameters are off by one and the same."""


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
    path = _listed(module, batch, promised)
    measurement = _measured(module, batch, loss, path, promised)
    model = at_length(promised, measurement)
    text = Text.of(module, model, batch, loss)
    case = case_of(model, text, measurement)
    with without_warnings():
        prediction = predict(case.model, **case.inputs)
        comparison = compare(prediction, measurement)
    names = {"token": _table(module)}
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    more, notes = rules(Seen(prediction, comparison, names, model, dtype))
    left = _left_out(module, model.seq_len)
    weights = drawn_rows(module)
    findings = [
        *refusal.findings,
        *odd_namesakes(module),
        *_off(weights),
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
            f"sums and norms within its layers ({why_not(refusal)}): what leaves each layer is "
            "compared with the config's prediction",
            *(() if weights else ("the variances of its matrices, which no class draws",)),
        ),
        rows=(*stream_numbers(prediction, comparison), *weights),
        model=model,
        prediction=prediction,
        comparison=comparison,
        read=f"measured on {batch_shape(batch)}" + (" of random input" if random else ""),
    )


def _listed(module: nn.Module, batch: Any, promised: Transformer) -> str:
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


# --- by what its class draws ----------------------------------------------------------------------


def drawn_rows(module: nn.Module) -> list[Row]:
    """The mean square of every parameter beside that of a draw by its own class in transformers;
    none for modules of other libraries."""
    parameters, rows = dict(module.named_parameters()), []
    for name, tensor in redrawn(module):
        if not tensor.numel():
            continue
        own, other = EntryMoments.of(parameters[name]), EntryMoments.of(tensor)
        at = 0, "", name, "variance", other.square, own.square
        if not own.square and not other.square:
            rows.append(Row(*at, True))
        elif not own.square or not other.square:
            rows.append(Row(*at, False))
        elif own.count < LEAST:
            rows.append(Row(*at, None, "few entries"))
        else:
            granted = NEAR + FAR * math.hypot(own.spread, other.spread)
            near = abs(math.log(own.square / other.square)) <= math.log1p(granted)
            rows.append(Row(*at, near, stderr=other.square * other.spread))
    return rows


def _off(rows: list[Row]) -> Iterator[Finding]:
    """Parameters of another variance than their class draws, one finding for those that are off by
    the same factor."""
    failed = sorted((row for row in rows if row.passed is False), key=lambda row: row.ratio)
    while failed:
        first = failed[0]
        alike = [r for r in failed if abs(r.ratio - first.ratio) <= ALIKE * abs(first.ratio)]
        alike = alike or [r for r in failed if math.isnan(r.ratio)]
        failed = [row for row in failed if row not in alike]
        names = gathered_names([row.parameter for row in rows if row in alike])
        if not first.measured:
            why = f"all entries are 0, where its class draws a variance of {first.expected:.3g}"
        elif not first.expected:
            why = f"the mean square is {first.measured:.3g}, where its class writes zeros"
        else:
            why = f"the variance is {first.ratio:.3g} times what its class draws"
            why += f" ({first.measured:.3g} for {first.expected:.3g})"
        mend = "draw it as the class does, or pass the scheme that is meant (scheme=)"
        measured, expected = first.measured, first.expected
        yield Finding("error", "wrong variance", names, (), measured, expected, why, mend)


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
