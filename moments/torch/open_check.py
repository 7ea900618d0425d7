"""`moments.check` of a module that no Transformer describes: by its config, or by its operations.

By operations, the outputs of submodules are compared with the prediction from the variances of
parameters, tensors with those of the same name in other layers, and the signal and gradient of the
first layer with those of the last. By config, layers are the entries of the one list of submodules
that is as long as the config's stack: their inputs and outputs are compared with the prediction of
the config, and matrices with the variances that it declares and with those of other layers.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MomentsError, without_warnings
from ..model.embedding import Embedding
from ..model.huggingface.config import from_huggingface
from ..model.transformer import Transformer
from ..prediction.draws import STREAM, WeightGradient
from ..prediction.predict import predict
from ..show.comparison import Comparison, compare
from ..show.findings import Finding, Report, Row, ranked
from ..show.health import GRADIENT, Evidence, first_outlier, rules, stream_numbers
from .alike import differences, lists_of, odd_namesakes
from .batches import MOST_TOKENS, SEQUENCES, batch_shape, completed, shortened
from .checkpoints import redrawn
from .dataflow.graph import SELECTIONS, VIEWS, Graph
from .dataflow.reading import random_part, recorded
from .diagnose import Text, at_length, case_of
from .entries import EntryMoments
from .factory import seen_of
from .measure import Loss, measure
from .operations.laws import F64
from .operations.predict import Lowered, ModulePrediction, OperationRow, lowered, summary
from .operations.sampling import again
from .operations.variables import Field, Mix, Product, Sampled, Variable
from .roles import WHOLE, HookPoint, gathered_names

DRAWS = 24
"""Random draws of operations without a law."""

APART = {"mean square": 4.0, "gradient variance": 32.0}
"""Factor between one draw's number and the prediction from which it is a finding. Over 36 draws of
three modules of width 96 the largest are 1.5 and 2.6; for experts of width 64 that read nearly
equal tokens, 2.3 and 17 in 5 draws."""

DEVIATIONS = 4.0
"""The same in units of `OperationRow.scatter`, if that is more (few features, or equal tokens)."""

CHOOSING = SELECTIONS | {"argmax", "max"}
"""Operations by which tokens choose experts."""

SIGNIFICANT = 1e-12
"""Mean square up to which an output counts as zero, and is not judged."""


def check_open(module: nn.Module, batch: Any, refusal: NotRead) -> Report:
    """Check a module that could not be read by its operations.

    Raises:
        NotRead: the refusal, if its operations cannot be followed either.
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
    """The report by operations; with `wider`, as in `lowered`, without measured rows."""
    followed, loss = _followed(module, batch, wider)
    prediction = summary(followed, DRAWS)
    gradients = {} if wider else _gradients(followed, loss)
    experts = _experts(followed, prediction, gradients)
    rows = [] if wider else list(_rows(followed, prediction, gradients, experts))
    findings = [*refusal.findings, *differences(module, followed.graph, followed.ids, followed.end)]
    findings += [*_far_from_prediction(rows), *_growth(prediction), *_gradient_size(prediction)]
    findings += _lost_streams(followed, prediction)
    weights = [] if wider else drawn_rows(module)
    findings += _wrong_variances(weights)
    notes = [*_signal_notes(prediction), *_gradient_notes(followed), *prediction.notes]
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
            *(("gradients inside experts, which depend on what tokens chose",) if experts else ()),
            *(f"what stands behind {words}" for words in unread),
        ),
        rows=(*rows, *weights),
        read="followed operation by operation on "
        + f"{prediction.tokens} tokens of " * bool(prediction.tokens)
        + ("random input" if batch is None else "the batch"),
    )


def why_not(refusal: NotRead) -> str:
    """Why a module was not read as a stack of layers."""
    return str(refusal).splitlines()[0].partition(IN_ANY_CASE)[0]


def _followed(
    module: nn.Module, batch: Any, wider: Mapping[str, Any] | None
) -> tuple[Lowered, str | None]:
    """The operations with the next token's cross-entropy if there are logits, else a random
    gradient at the output; and the name of the loss."""
    try:
        return lowered(module, batch, "cross-entropy", wider=wider, scalars=False), "cross-entropy"
    except MomentsError:
        return lowered(module, batch, wider=wider, scalars=False), None


def _gradients(followed: Lowered, loss: str | None) -> dict[int, Tensor]:
    """The gradient of every value of the recorded pass."""
    graph, values = followed.graph, {}
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
        end = values[followed.end]
        if loss is None:
            random = torch.Generator().manual_seed(0)
            end.backward(torch.randn(end.shape, generator=random).to(end.dtype))
        else:
            ids = followed.ids
            assert ids is not None
            logits, targets = end[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
            nn.functional.cross_entropy(logits, targets).backward()
    return {n: t.grad for n, t in kept.items() if t.grad is not None}


def _rows(
    followed: Lowered,
    prediction: ModulePrediction,
    gradients: Mapping[int, Tensor],
    experts: Collection[str],
) -> Iterator[Row]:
    """The mean square and the gradient of every submodule's output, beside their predictions."""
    states = followed.lowering.states
    for row in prediction.outputs:
        x = followed.graph.tensor(row.value).to(F64)
        expected, measured = row.variance + row.mean**2, float(x.square().mean())
        yield _row(row, "mean square", expected, measured)
        g = gradients.get(row.value)
        if row.grad_variance and g is not None:
            square = float(g.to(F64).square().mean())
            # A number that multiplies a whole place also changes norms, which the law leaves out.
            state = states[row.value]
            scalar = isinstance(state, Field) and state.variable.features == 1
            judged = not scalar and _numberless(row.module) not in experts
            yield _row(row, "gradient variance", row.grad_variance, square, judged)


def _experts(
    followed: Lowered, prediction: ModulePrediction, gradients: Mapping[int, Tensor]
) -> set[str]:
    """Numberless paths of submodules that only some tokens choose, whose gradient depends on it.

    The first token has one key, and the last no next token; a third without a gradient chose
    another expert.
    """
    if not any(node.name in CHOOSING for node in followed.graph.nodes):
        return set()
    rows = ((row.module, gradients.get(row.value)) for row in prediction.outputs)
    chosen = (path for path, g in rows if g is not None and int((g == 0).all(-1).sum()) > 2)
    return {_numberless(path) for path in chosen}


def _numberless(path: str) -> str:
    """A path with a star for its last number."""
    return re.sub(r"(^|\.)\d+(?=(\.[^\d.][^.]*)*$)", r"\1*", path)


def _row(
    row: OperationRow, quantity: str, expected: float, measured: float, judged: bool = True
) -> Row:
    numbers = 0, "", row.module, quantity, expected, measured
    if expected <= SIGNIFICANT and measured <= SIGNIFICANT:
        return Row(*numbers)
    apart = max(APART[quantity], math.exp(DEVIATIONS * row.scatter))
    passed = expected > 0 and 1 / apart <= measured / expected <= apart
    low, high = expected / apart, expected * apart
    return Row(*numbers, passed if judged else None, low=low, high=high)


def _far_from_prediction(rows: list[Row]) -> Iterator[Finding]:
    """One finding for the submodules whose outputs or gradients are far from the prediction."""
    for quantity in APART:
        failed = [row for row in rows if row.quantity == quantity and row.passed is False]
        if not failed:
            continue
        names = gathered_names([row.parameter or "the module" for row in failed])
        first = failed[0]
        why = f"the {quantity} of what {first.parameter or 'the module'} gives is "
        why += f"{first.ratio:.3g} times what independent entries of its parameters' variances give"
        mend = "look for copies of one tensor, rows of unlike size, hooks that change what it gives"
        kind, numbers = f"unlike its parameters: {quantity}", (first.measured, first.expected)
        yield Finding("warning", kind, names, (), *numbers, why, mend)


def _layers(prediction: ModulePrediction) -> list[OperationRow]:
    """The rows of the longest list of submodules with parts, which is in no other such list."""
    lists: dict[str, list[OperationRow]] = {}
    parents = {row.module.rpartition(".")[0] for row in prediction.outputs}
    for row in prediction.outputs:
        parent, _, last = row.module.rpartition(".")
        if last.isdigit() and row.module in parents and row.correlation is not None:
            lists.setdefault(parent, []).append(row)
    lists = {f"{parent}." if parent else "": rows for parent, rows in lists.items() if rows[1:]}
    outer = (
        rows
        for name, rows in lists.items()
        if not any(name != other and name.startswith(other) for other in lists)
    )
    return max(outer, key=len, default=[])


def _gradient_size(prediction: ModulePrediction) -> Iterator[Finding]:
    """A gradient that vanishes or explodes relative to the signal from the last layer to the
    first."""
    rows = [row for row in _layers(prediction) if row.grad_variance and row.variance > 0]
    if len(rows) < 2:
        return
    first, last = rows[0], rows[-1]
    sizes = [row.variance * (row.grad_variance or 0.0) for row in (first, last)]
    ratio = sizes[0] / sizes[1]
    if 1 / GRADIENT <= ratio <= GRADIENT:
        return
    change = "vanishes" if ratio < 1 else "explodes"
    why = f"the gradient {change} towards the input: times the signal's variance it is "
    why += f"{ratio:.2g} times at {first.module} what it is at {last.module}"
    mend = "scale what blocks add by their number, or normalise what they read"
    names = first.module, last.module
    yield Finding("warning", f"gradient {change}", names, (), ratio, math.nan, why, mend)


def _growth(prediction: ModulePrediction) -> Iterator[Finding]:
    """A variance that more than doubles in every layer of the later half; equal branches at most
    double it over all of that half."""
    rows = _layers(prediction)
    later = rows[(len(rows) - 1) // 2 :]
    if len(later) < 3 or not min(row.variance for row in later) > 0:
        return
    first, last = later[0], later[-1]
    factor = float(last.variance / first.variance) ** (1 / (len(later) - 1))
    last_factor = float(last.variance / later[-2].variance)
    # sums of all earlier streams grow by (n + 1)^2 / n^2
    if factor > 2 and last_factor > min(3, 0.9 * factor):
        why = f"the variance grows {factor:.3g} times with every layer from {first.module} to "
        why += f"{last.module}, where branches of one size add up to 2 times over all of them"
        mend = (
            "look for an input that is added twice, or a branch that reads what is not normalised"
        )
        names = first.module, last.module
        yield Finding("warning", "variance explodes", names, (), factor, math.nan, why, mend)


def _lost_streams(followed: Lowered, prediction: ModulePrediction) -> Iterator[Finding]:
    """A finding if the layers attend, keep the shape of their input, and what enters none of them
    is part of what enters the next."""
    layers, states = _layers(prediction), followed.lowering.states
    inputs = {one.path: one.value for one in followed.graph.boundaries if one.side == "input"}
    stream = [states.get(inputs.get(row.module, -1)) for row in layers]
    stream += [states.get(row.value) for row in layers[-1:]]
    fields = [x for x in stream if isinstance(x, Field)]
    if not layers and _attentions_in_series(followed) >= 3:
        yield _no_residual(())
    if len(fields) < max(3, len(stream)) or len({x.site.shape for x in fields}) > 1:
        return
    judged = 0
    for before, after in itertools.pairwise(x.variable for x in fields):
        kept, behind = _sources(before), _sources(after)
        if kept is None or behind is None or (kept and kept <= behind):
            return
        if not any(isinstance(v, Mix) and v.number > before.number for v in _ancestors(after)):
            return
        judged += bool(kept)
    if judged:
        yield _no_residual(gathered_names([row.module for row in layers]))


def _no_residual(names: tuple[str, ...]) -> Finding:
    why = "no layer adds its input to its output: a block replaces the stream, so that all "
    why += "that a layer passes on has gone through its weights"
    mend = "add what a block returns: x = x + block(norm(x))"
    return Finding("warning", "no residual path", names, reason=why, mend=mend)


def _attentions_in_series(followed: Lowered) -> int:
    """Averages over tokens behind one another from the output down to the first sum of products of
    different tensors, or to the input."""
    state, count = followed.lowering.states[followed.end], 0
    below = {state.variable.number: state.variable} if isinstance(state, Field) else {}
    while len(below) == 1:
        (variable,) = below.values()
        products = _products(variable)
        if products is None:
            return 0
        count += any(isinstance(one, Mix) for one in products)
        inner = [one.values if isinstance(one, Mix) else one.source for one in products]
        below = {v.number: v for v in inner if v is not None}
    return 0 if below else count


def _sources(variable: Variable) -> set[int] | None:
    """Numbers of the variables of `_products`; None if it rests on what was drawn."""
    products = _products(variable)
    return None if products is None else {one.number for one in products}


def _products(variable: Variable) -> list[Product | Mix] | None:
    """Products with weights and averages over tokens of which a variable is a function entry by
    entry; None if it rests on what was drawn."""
    nearest = list(_ancestors(variable, (Product, Mix)))
    if any(isinstance(one, Sampled) for one in nearest):
        return None
    return [one for one in nearest if isinstance(one, Product | Mix)]


def _ancestors(variable: Variable, up_to: tuple[type[Variable], ...] = ()) -> Iterator[Variable]:
    """A variable and what it is made of, not what variables of the types `up_to` are made of."""
    waiting, seen = [variable], set()
    while waiting:
        one = waiting.pop()
        if one.number not in seen:
            seen.add(one.number)
            yield one
            waiting += () if isinstance(one, up_to) else one.parents


def _signal_notes(prediction: ModulePrediction) -> Iterator[str]:
    """Variance and correlation of the first and the last layer."""
    if rows := _layers(prediction):
        first, last = rows[0], rows[-1]
        yield (
            f"from {first.module} to {last.module} the variance goes from {first.variance:.3g} to "
            f"{last.variance:.3g}, the correlation of tokens from {first.correlation:.2f} to "
            f"{last.correlation:.2f}"
        )


def _gradient_notes(followed: Lowered) -> Iterator[str]:
    """Matrices that get no gradient in the first step."""
    ndim = {v.name: v.tensor.ndim for v in followed.graph.values if v.params}
    squares = followed.weights
    names = [name for name, square in squares.items() if square == 0 and ndim.get(name, 0) > 1]
    if names and len(names) < len(squares):
        yield f"no gradient reaches {', '.join(gathered_names(names))} in the first step"


# --- refusals -------------------------------------------------------------------------------------

REMEMBERED = 4.0
"""Tokens of memory from which a state adds to the convolution over four tokens before it."""

IN_ANY_CASE = "; wrong in any case: "
"""Precedes the findings on a module that is refused."""


class NotRead(MomentsError):
    """A module that `moments.check` cannot describe.

    Attributes:
        findings: faults that were found all the same.
    """

    def __init__(self, why: str, findings: tuple[Finding, ...] = ()) -> None:
        line, *rest = why.split("\n", 1)
        said = "".join(f"{IN_ANY_CASE}{finding}" for finding in findings)
        super().__init__("\n".join([line + said, *rest]))
        self.findings = findings


def not_read(module: nn.Module, batch: Any, why: str) -> NotRead:
    """The refusal of a module, with faults that its operations show all the same."""
    result = list(seen_of(module))
    try:
        graph, used = recorded(module, batch)
        result += _forgetting(graph)
        result += random_outcome(random_part(module, used))
    except Exception:  # a refusal must not fail for what it could add
        pass
    return NotRead(why, ranked(result))


_COPYING = (*VIEWS, "clamp", "clamp_min", "clamp_max", "repeat", "repeat_interleave", "index")


def _forgetting(graph: Graph) -> Iterator[Finding]:
    """A finding on recurrences of a recorded pass that forget their state within few tokens.

    State-space layers and gated linear attention multiply a state by exp(-step A) at every token,
    with step = softplus(x + b) and A > 0 a parameter. Steps are drawn between .001 and .1 (Gu and
    Dao 2023, arXiv:2312.00752, section 3.6); a bias b of ones or zeros forgets the state at once.
    """
    short: list[tuple[str, Tensor, Tensor, float]] = []  # bias, entries, steps, tokens of memory
    for node in graph.nodes:
        if node.name != "softplus" or not graph.values[node.outputs[0]].live:
            continue
        bias, decay = _bias(graph, node.inputs[0]), _decay(graph, node.outputs[0])
        if bias is None or decay is None:
            continue
        memory = float(1 / (-decay).clamp(min=1e-12).min())  # until it has decayed to 1/e
        if memory < REMEMBERED:
            both = (graph.tensor(n).detach().double() for n in (bias, node.outputs[0]))
            short.append((str(graph.values[bias].name), *both, memory))
    if not short:
        return
    names, biases, steps, memories = zip(*short, strict=True)
    low, high = min(float(s.min()) for s in steps), max(float(s.max()) for s in steps)
    first = float(biases[0].flatten()[0])
    constant = all(b.numel() > 1 and bool(((b - first).abs() <= 1e-6).all()) for b in biases)
    longest = max(memories)
    why = f"all entries are {first:g}: " if constant else ""
    why += f"steps of the recurrence lie between {low:.2g} and {high:.2g}, and the state that "
    why += f"remembers longest is down to 1/e after {longest:.2g} tokens"
    mend = "draw steps log-uniformly between .001 and .1 and set the bias to the inverse of "
    mend += "softplus"
    at = gathered_names(list(names)), ()
    yield Finding("warning", "forgetting", *at, longest, REMEMBERED, why, mend)


def _bias(graph: Graph, value: int) -> int | None:
    """The parameter that was added to a value."""
    node = graph.producer(value)
    while node is not None:
        name = node.name.rstrip("_")
        for other in node.inputs:
            adds = name == "add" or (name == "addmm" and node.inputs[0] == other)
            fixed = not graph.values[other].live and graph.values[other].params
            if adds and fixed and (parameter := _viewed(graph, other)) is not None:
                return parameter
        if node.name not in _COPYING or not node.inputs:
            return None
        node = graph.producer(node.inputs[0])
    return None


def _viewed(graph: Graph, value: int) -> int | None:
    """The parameter that a fixed value is, or is a view or a copy of."""
    named = [leaf for leaf in graph.leaves(value) if graph.values[leaf].name]
    is_view = all(node.name in VIEWS for node in graph.ancestor_nodes(value))
    return named[0] if is_view and len(named) == 1 else None


def _decay(graph: Graph, steps: int) -> Tensor | None:
    """The logarithms of the state's decay per token: steps times a negative parameter."""
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
            if node.name in _COPYING:
                waiting += node.outputs
    return None


def random_outcome(path: str | None) -> Iterator[Finding]:
    """A finding on a submodule that draws random numbers in evaluation mode."""
    if path is not None:
        why = f"in evaluation mode {path} draws random numbers: dropout, or another draw, acts "
        why += "where it should not"
        mend = "pass training=self.training to functional.dropout (dropout_p = p if self.training "
        mend += "else 0 to scaled_dot_product_attention), or use nn.Dropout"
        yield Finding("error", "dropout left on", (path,), reason=why, mend=mend)


# --- by config ------------------------------------------------------------------------------------

FAR = 6.0
"""Standard deviations beyond band and tolerance from which a point is a finding."""

LEAST = 8
"""Entries below which the mean square of a parameter says little."""

NEAR = 0.05
"""Relative tolerance of a parameter's variance, besides its sampling error."""

ALIKE = 0.1
"""Relative difference of ratios up to which parameters are off by the same factor."""


def check_promised(
    module: nn.Module, batch: Any, promised: Transformer, loss: Loss | None, refusal: NotRead
) -> Report:
    """Check a module against its config alone.

    Raises:
        MomentsError: it is not one stack over token ids, no list of submodules is its layers, or it
            does not run.
    """
    if not isinstance(promised.embedding, Embedding) or promised.encoder is not None:
        raise MomentsError("a config of no single stack over token ids")
    random = batch is None
    if random:
        generator, size = torch.Generator().manual_seed(0), (1, min(MOST_TOKENS, promised.seq_len))
        rows = promised.embedding.vocab_size
        batch = {"input_ids": torch.randint(rows, size, generator=generator)}
    batch = shortened(batch, SEQUENCES, MOST_TOKENS)
    batch = completed(module, batch) if loss is None else batch
    path = _listed(module, batch, promised)
    points = [HookPoint(0, STREAM, f"{path}.0", "input")]
    points += [HookPoint(n + 1, STREAM, f"{path}.{n}", "output") for n in range(promised.layers)]
    learning = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    parts = [(WeightGradient(0, name, name), WHOLE) for name in learning]
    measurement = measure(module, batch, loss=loss, parts=(tuple(points), parts))
    model = at_length(promised, measurement)
    text = Text.of(module, model, batch, loss)
    case = case_of(model, text, measurement)
    with without_warnings():
        prediction = predict(case.model, **case.inputs)
        comparison = compare(prediction, measurement)
    tables = (p for p, part in module.named_modules() if isinstance(part, nn.Embedding))
    names = {"token": tuple(f"{path}.weight" for path in itertools.islice(tables, 1))}
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    more, notes = rules(Evidence(prediction, comparison, names, model, dtype))
    not_modelled = _not_modelled(module, model.seq_len)
    weights = drawn_rows(module)
    findings = [
        *refusal.findings,
        *odd_namesakes(module),
        *_wrong_variances(weights),
        *_mismatch(comparison, path, bool(not_modelled)),
    ]
    kinds = {finding.kind for finding in findings}
    findings += [finding for finding in more if finding.kind not in kinds]
    return Report(
        source=type(module).__name__,
        scheme="compared with the initialisation that its config promises",
        findings=tuple(findings),
        notes=(*not_modelled, *notes),
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
    """Path of the one list of as many submodules as the config has layers, of d_model features."""
    graph, _ = recorded(module, batch, rows=1)
    lists = [
        layers[0].path.rpartition(".")[0]
        for layers in lists_of(module, graph)
        if len(layers) == promised.layers
        and graph.tensor(layers[-1].output).shape[-1] == promised.d_model
    ]
    outer = [p for p in lists if not any(p.startswith(f"{other}.") for other in lists)]
    if len(outer) != 1:
        raise MomentsError(f"{len(outer)} lists of {promised.layers} submodules")
    return outer[0]


# --- by what its class draws ----------------------------------------------------------------------


def drawn_rows(module: nn.Module) -> list[Row]:
    """The mean square of every parameter against a draw by its own class in transformers; no rows
    for modules of other libraries."""
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


def _wrong_variances(rows: list[Row]) -> Iterator[Finding]:
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


def _not_modelled(module: nn.Module, seq_len: int) -> list[str]:
    """The reader's warnings about entries of the config that are not modelled."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from_huggingface(module.config, seq_len=seq_len)
    notes = (str(warning.message) for warning in caught)
    return [note for note in dict.fromkeys(notes) if "is not modelled" in note]


def _mismatch(comparison: Comparison, path: str, incomplete: bool) -> Iterator[Finding]:
    """The first point of the stream far from the config's prediction; a note if the prediction is
    `incomplete`."""
    points = comparison.outliers(FAR)
    embedding = comparison.prediction.model.embedding
    if embedding is not None and embedding.norm:  # the first layer may contain that norm
        points = points[points["layer"] > 0]
    if not len(points):
        return
    layer, measured, predicted, why = first_outlier(points, "config's initialisation gives")
    where = (f"{path}.{max(layer - 1, 0)}",), (layer,) if layer else ()
    severity, kind = "note" if incomplete else "warning", "not what its config gives"
    mend = "look at that layer's matrices, its sums, scales and norms"
    yield Finding(severity, kind, *where, measured, predicted, why, mend)
