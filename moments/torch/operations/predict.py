"""Prediction of a module's signal and gradient by its operations."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ...errors import MomentsError, domain_error
from ...files import as_frame, plain
from ...formulas.checks import NONNEGATIVE, check_count, check_number
from ...layers.head.cross_entropy import softmax_expectations
from ...layers.head.softmax_agreement import agreement_share
from ...show.report import tabled
from ..dataflow.graph import Graph
from ..dataflow.reading import recorded
from ..roles import gathered_names
from ..running import built, made_on_cpu
from .laws import F64, Replicas
from .lowering import PLACES, Lowering
from .sampling import SETTLED
from .scalars import squared_gradients
from .variables import Field, Sampled, Square, Variable

if TYPE_CHECKING:
    import pandas as pd

ROWS, TOKENS = 1, 16
"""Sequences and tokens of a batch that are used: every pair of tokens has a covariance."""

NORMED_ROWS = 4
"""Sequences or pictures for modules that mix them, as by batch norm."""

_WORDS = {
    "Product": "a matrix product",
    "Entries": "a parameter",
    "Fixed": "known numbers",
    "Combination": "a sum",
    "Blend": "an average over places",
    "Joined": "joined features",
    "Part": "some features",
    "Curve": "an activation",
    "Square": "a square",
    "Times": "a product",
    "Mix": "an average over keys",
    "Sampled": "a sampled operation",
}
"""Classes of variables in words, for notes."""


class OperationRow(NamedTuple):
    """One recorded tensor.

    Attributes:
        module: path of the innermost submodule with the operation; "" without one.
        operation: that gives it.
        value: number of the tensor in the recorded pass.
        mean, variance: over draws of the weights and features, averaged over sites.
        correlation: mean over ordered pairs of different sites; None for one site.
        grad_variance: of the loss's derivative in it; None without a gradient.
        grad_correlation: likewise.
        sampled: whether it depends on an operation without a law, which was drawn.
        scatter: relative deviation of its mean square between draws, for Gaussian features.
    """

    module: str
    operation: str
    value: int
    mean: float
    variance: float
    correlation: float | None
    grad_variance: float | None
    grad_correlation: float | None
    sampled: bool
    scatter: float


@dataclass(frozen=True, eq=False)
class ModulePrediction:
    """Moments of a module's tensors at initialisation, by the operations of one pass.

    Attributes:
        operations: every recorded tensor that depends on the batch, in order.
        outputs: the output of every submodule, in the order in which they end.
        weights: expected squared gradient norm of every parameter by name; of the loss, or without
            one of a random gradient at the output.
        sampled: operations without a law, which were drawn, and how often they occur.
        unread: (operation, reason) of operations without a prediction, and how often; tensors
            behind them have no row, tensors before them no gradient.
        notes: on other approximations.
        tokens: of the pass, 0 for pictures.
        draws: of sampled operations.
        gradient: the differentiated scalar in words.
    """

    operations: tuple[OperationRow, ...]
    outputs: tuple[OperationRow, ...]
    weights: dict[str, float]
    sampled: dict[str, int]
    unread: dict[tuple[str, str], int]
    notes: tuple[str, ...]
    tokens: int
    draws: int
    gradient: str

    def to_frame(self) -> pd.DataFrame:
        """One row per submodule's output: the fields of `OperationRow`."""
        return as_frame(self.outputs, OperationRow._fields)

    def operations_frame(self) -> pd.DataFrame:
        """One row per recorded tensor: the fields of `OperationRow`."""
        return as_frame(self.operations, OperationRow._fields)

    def weight_gradients(self) -> pd.DataFrame:
        """One row per parameter: parameter, squared_norm."""
        return as_frame(self.weights.items(), ("parameter", "squared_norm"))

    def to_json(self) -> str:
        """Everything as one JSON object."""
        data = {
            "outputs": [row._asdict() for row in self.outputs],
            "operations": [row._asdict() for row in self.operations],
            "weights": self.weights,
            "sampled": self.sampled,
            "unread": [[*what, times] for what, times in self.unread.items()],
            "notes": self.notes,
            "tokens": self.tokens,
            "draws": self.draws,
            "gradient": self.gradient,
        }
        return json.dumps(plain(data), indent=2)

    def table(self, depth: int = 3) -> str:
        """Submodules down to a depth of their paths, as text."""
        shown = [row for row in self.outputs if row.module.count(".") < depth]
        heads = ("module", "variance", "correlation", "grad variance", "grad correlation")
        rows = []
        for row in shown:
            numbers = (row.variance, row.correlation, row.grad_variance, row.grad_correlation)
            name = (row.module or "(the module)") + (" ~" if row.sampled else "")
            rows.append((name, *("" if x is None else f"{x:.3g}" for x in numbers)))
        title = "by submodule" + f", {self.tokens} tokens" * bool(self.tokens)
        table = tabled(title, heads, rows, text=1)
        lines = [table, f"gradients are those of {self.gradient}"]
        lines += ["~ rests on operations without a law, which were drawn"] if self.sampled else []
        lines += [
            f"{name}: not followed ({why}), {n} times" for (name, why), n in self.unread.items()
        ]
        return "\n".join([*lines, *self.notes])

    def __str__(self) -> str:
        return self.table()


@made_on_cpu
def predict(
    module: Any,
    batch: Any = None,
    *,
    loss: str | None = None,
    grad_variance: float = 1.0,
    draws: int = 24,
    seed: int = 0,
    tokens: int = TOKENS,
    places: int = PLACES,
) -> ModulePrediction:
    """Predict every operation of a module from one recorded pass and its parameters' variances.

    No part of the module is recognised: skip connections, norms, heads, experts and several streams
    are sums and products in the recorded pass. Covariances are in closed form to leading order in
    1/width, except behind operations without a law (softmax over keys, choices, scans), which are
    drawn.

    Args:
        module: an nn.Module, or a factory of one that takes a seed.
        batch: its input, as in `moments.torch.measure`, of which the first tokens of one sequence
            are used; None: random input.
        loss: "cross-entropy" of the next token, if the module gives logits (batch, tokens,
            vocabulary) of token ids; None: an independent gradient at every entry of its output.
        grad_variance: of that gradient.
        draws: of operations without a law.
        seed: of these draws.
        tokens: of the batch, at most.
        places: number of sites of a tensor (tokens, pairs of tokens, pixels) up to which it is
            predicted. A covariance takes 8 places^2 bytes, for hundreds of tensors, and drawing
            10 places^3 operations: 4096, pairs of 64 tokens, take gigabytes and minutes.

    Returns:
        A ModulePrediction: `table()`, `to_frame()` by submodule, `operations_frame()`,
        `weight_gradients()`, `to_json()`, and what was sampled or could not be followed.

    Raises:
        DomainError: an argument out of range, or a loss that its output does not have.
        MomentsError: the module cannot be run, or gives nothing that depends on the batch.
    """
    if loss not in (None, "cross-entropy"):
        raise domain_error("loss", loss, "'cross-entropy' or None")
    grad_variance = check_number("grad_variance", grad_variance, NONNEGATIVE)
    draws, seed = check_count("draws", draws), check_count("seed", seed, least=0)
    most = check_count("tokens", tokens), check_count("places", places)
    followed = lowered(built(module, seed), batch, loss, grad_variance, draws, seed, None, *most)
    return summary(followed, draws)


@dataclass(frozen=True, eq=False)
class Lowered:
    """A recorded pass with the laws of all its values.

    Attributes:
        graph: the pass; `end`: the value of its output.
        lowering: the state of every value.
        replicas: covariances with their derivatives.
        gradient: the differentiated scalar in words.
        scalars: squared gradients by name of parameters that are used as numbers.
    """

    graph: Graph
    end: int
    lowering: Lowering
    replicas: Replicas
    gradient: str
    scalars: dict[str, float] = field(default_factory=dict)

    @property
    def ids(self) -> Tensor | None:
        """(batch, tokens) token ids, if the output is logits over their vocabulary; else None."""
        logits = self.graph.tensor(self.end)
        for value in self.graph.values:
            ids = value.tensor
            if not value.live or value.producer is not None or ids.is_floating_point():
                continue
            fits = logits.ndim == 3 and ids.shape == logits.shape[:2]
            if fits and int(ids.max()) < logits.shape[-1]:
                return ids
        return None

    @property
    def cut(self) -> int:
        """Operations, as bits, whose gradient also passes operations without a prediction."""
        bits = 0
        for value in self.lowering.lost:
            bits |= self.graph.ancestors(value)
        return bits

    @property
    def left(self) -> list[str]:
        """Parameters whose gradients have no law."""
        names = {root.partition("#")[0] for root in self.lowering.coherent}
        names -= self.scalars.keys()
        return [v.name for v in self.graph.values if v.params and v.name in names]

    @property
    def weights(self) -> dict[str, float]:
        """Squared gradient norms of parameters whose gradients are predicted completely."""
        cut, left = self.cut, self.left
        names = [
            v.name
            for v in self.graph.values
            if v.name is not None and v.params and not any(cut >> n & 1 for n in v.consumers)
            if v.name not in left
        ]
        total = {name: self.lowering.sampler.squares.get(name, 0.0) for name in names}
        for root, leaf in self.replicas.weights.items():
            name = root.partition("#")[0]
            if leaf.grad is not None and name in total:
                total[name] += float(leaf.grad) * self.lowering.sampler.slope(root)
        return total | {n: square for n, square in self.scalars.items() if n in total}


def lowered(
    module: nn.Module,
    batch: Any,
    loss: str | None = None,
    grad_variance: float = 1.0,
    draws: int = 24,
    seed: int = 0,
    wider: Mapping[str, tuple[float, ...]] | None = None,
    tokens: int = TOKENS,
    places: int = PLACES,
    scalars: bool = True,
) -> Lowered:
    """Record a pass, lower it to variables, and propagate a gradient; arguments as of `predict`.

    Args:
        wider: parameter -> by axis, the ratio of the true size to the module's.
        scalars: whether to compute gradients of parameters that are used as numbers.
    """
    if any(p.is_meta for p in module.parameters()):
        raise MomentsError(
            "the module is on the meta device and has no entries: module.to_empty(device=...), "
            "then initialise every tensor"
        )
    if any(isinstance(x, Tensor) and not x.numel() for x in tree_flatten(batch)[0]):
        raise domain_error("batch", "a tensor without entries", "one sequence or more")
    with _spelled_out(module):
        batched = any(isinstance(p, nn.modules.batchnorm._BatchNorm) for p in module.modules())
        rows = NORMED_ROWS if batched else ROWS
        graph, _ = recorded(module, batch, rows, tokens)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            lowering = Lowering(graph, draws, seed, wider or {}, places)
            return _with_gradient(lowering, loss, grad_variance, scalars)
    except RuntimeError as error:  # tensors may have other shapes in other draws
        if routed := graph.selecting_submodule():
            raise MomentsError(
                f"{routed} gathers as many rows for each expert as chose it, which is another "
                "number in every draw: give every expert all rows, with weight 0 where it was not "
                "chosen"
            ) from error
        raise


def _with_gradient(
    lowering: Lowering, loss: str | None, grad_variance: float, scalars: bool
) -> Lowered:
    """A lowered pass with the gradients of its variables' covariances."""
    graph = lowering.graph
    end, state = _output(graph, lowering)
    if bool(torch.isnan(graph.tensor(end)).any()):
        raise MomentsError(
            "what the module gives is nan: its entries or those of the batch are not finite, or an "
            "operation overflows; pass moments.check the module to find which"
        )
    words = f"an independent gradient of variance {grad_variance:g} at every entry of the output"
    words = words if loss is None else "the cross-entropy of the next token"
    followed = Lowered(graph, end, lowering, Replicas(crossed=True), words)
    for value, drawn in reversed(lowering.states.items()):  # the last first: draws are reused
        real = graph.tensor(value).is_floating_point() and value not in lowering.lost
        if real and isinstance(drawn, Field) and type(drawn.variable) is Sampled:
            lowering.sampler.law(drawn.variable)
    covariance = lowering.laws.covariance(state.variable, state.variable, followed.replicas)
    kernel = _cotangent(followed, state, loss, grad_variance)
    if covariance.requires_grad:
        covariance.backward(kernel)
        followed.replicas.collect()
    if scalars:
        followed.scalars.update(squared_gradients(lowering, state.variable, kernel))
    return followed


@contextlib.contextmanager
def _spelled_out(module: nn.Module) -> Iterator[None]:
    """Run experts of transformers as batched products within the context, because loops over
    experts have shapes that depend on the batch."""
    name = "_experts_implementation"
    configs = {id(c): c for part in module.modules() if (c := getattr(part, "config", None))}
    settings = [(c, getattr(c, name)) for c in configs.values() if getattr(c, name, None)]
    for config, _ in settings:
        setattr(config, name, "batched_mm")
    try:
        yield
    finally:
        for config, value in settings:
            setattr(config, name, value)


def _output(graph: Graph, lowering: Lowering) -> tuple[int, Field]:
    """The first real tensor in the module's output that depends on the batch."""
    for value in tree_flatten(graph.outputs)[0]:
        if isinstance(value, int) and graph.tensor(value).is_floating_point():
            state = lowering.states.get(value)
            if isinstance(state, Field):
                return value, state
    raise MomentsError("the module gives no tensor that depends on the batch and on random weights")


def _cotangent(followed: Lowered, state: Field, loss: str | None, variance: float) -> Tensor:
    """The gradient kernel at the output: (sites, sites) products, summed over features."""
    sites, features = torch.unique(state.site), torch.unique(state.feature)
    kernel = torch.zeros(state.variable.sites, state.variable.sites, dtype=F64)
    if loss is None:
        kernel[sites, sites] = variance * len(features)
        return kernel
    logits, ids = followed.graph.tensor(followed.end), followed.ids
    if ids is None:
        allowed = f"None of an output of shape {tuple(logits.shape)}"
        raise domain_error("loss", loss, allowed, "it takes logits of every token id")
    if ids.shape[1] < 2:
        raise domain_error("loss", loss, "None of one token", "no other follows it: pass two")
    vocabulary = logits.shape[-1]
    at, targets = state.site[:, :-1, 0].reshape(-1), ids[:, 1:].reshape(-1)
    z = followed.lowering.laws.covariance(state.variable, state.variable)[at][:, at]
    same = (targets[:, None] == targets[None]).to(F64)
    products = _agreement(vocabulary, z) - 2 / vocabulary + same
    kernel[at[:, None], at[None]] = products / len(at) ** 2
    return kernel


def _agreement(vocabulary: int, logits: Tensor) -> Tensor:
    """E sum_v p_v p'_v of two tokens' softmaxes, from the covariance of their logits."""
    variance = float(logits.diagonal().mean())
    square = float(softmax_expectations(vocabulary, variance).other.probability_square)
    scale = logits.diagonal().sqrt()
    rho = (logits / (scale[:, None] * scale[None]).clamp_min(1e-300)).clamp(-1, 1)
    share = torch.as_tensor(np.asarray(agreement_share(vocabulary, variance, rho.numpy())))
    apart = -2 * np.log(vocabulary)
    return vocabulary * torch.exp(apart + share * (np.log(square) - apart))


def summary(followed: Lowered, draws: int) -> ModulePrediction:
    """The prediction of a lowered pass."""
    graph, lowering, replicas = followed.graph, followed.lowering, followed.replicas
    paths, cut = _paths(graph), followed.cut
    rows: dict[int, OperationRow] = {}
    passed = lowering.sampler.passed()
    for value, state in lowering.states.items():
        if not isinstance(state, Field) or value in lowering.lost:
            continue
        if not graph.tensor(value).is_floating_point() or graph.tensor(value).numel() == 0:
            continue
        row = _row(graph, lowering, replicas, value, state, paths)
        node = graph.values[value].producer
        incomplete = node is not None and cut >> node & 1
        if row is not None and (incomplete or value in passed):
            row = row._replace(grad_variance=None, grad_correlation=None)
        if row is not None:
            rows[value] = row
    outputs = []
    for path, side, value, _ in graph.boundaries:
        if side == "output" and value in rows:
            outputs.append(rows[value]._replace(module=path))
    weights = followed.weights
    notes = [
        f"covariances of {_WORDS[one]} and {_WORDS[other]} of the same weights are taken as 0"
        for one, other in sorted(lowering.laws.left_out)
    ]
    if lowering.sampler.error > 1.5 * SETTLED:
        notes.append(
            f"mean squares of what was drawn are known within {lowering.sampler.error:.0%} (one "
            "standard error of the least well known)"
        )
    if lowering.tied and "cross-entropy" in followed.gradient:
        notes.append(
            f"{', '.join(sorted(lowering.tied))}: a table and a matrix behind it; in the loss a "
            "token's own logit is taken as any other (gradients up to twice)"
        )
    if left := followed.left:
        notes.append(
            f"no gradients of {', '.join(gathered_names(left))}, one entry of which acts on all "
            "features of a place: it moves norms as well"
        )
    if lowering.chosen:
        notes.append("rows that experts take are those that this pass chose for them")
    live = (v.tensor.shape for v in graph.values if v.live and v.producer is None)
    tokens = next((shape[1] for shape in live if len(shape) in (2, 3)), 0)
    return ModulePrediction(
        tuple(rows.values()),
        tuple(outputs),
        weights,
        dict(lowering.sampled),
        dict(lowering.unread),
        tuple(notes),
        tokens,
        draws,
        followed.gradient,
    )


def _row(
    graph: Graph,
    lowering: Lowering,
    replicas: Replicas,
    value: int,
    state: Field,
    paths: dict[int, str],
) -> OperationRow | None:
    variable, laws = state.variable, lowering.laws
    sites = torch.unique(state.site)
    if isinstance(variable, Square):  # only its mean has a law
        return None
    means, covariance = laws.shown(state)
    mean, covariance = float(means[sites].mean()), covariance[sites][:, sites]
    node = graph.producer(value)
    crossed = replicas.known.get((variable.number, variable.number))
    gradient = None if crossed is None else crossed.grad
    grad_moments: tuple[float | None, float | None] = None, None
    if gradient is not None:
        grad_moments = _variance_and_correlation(gradient[sites][:, sites] / variable.features)
    return OperationRow(
        paths.get(-1 if node is None else node.index, ""),
        "" if node is None else node.name,
        value,
        mean,
        *_variance_and_correlation(covariance),
        *grad_moments,
        _depends_on_draws(variable, {}),
        _scatter(covariance, len(torch.unique(state.feature))),
    )


def _scatter(covariance: Tensor, features: int) -> float:
    """Relative deviation of a mean square over sites and F independent Gaussian features:
    sqrt(2 sum C_ij^2 / F) / sum C_ii."""
    total = float(covariance.diagonal().sum())
    return float((2 * covariance.square().sum() / features).sqrt()) / total if total > 0 else 0.0


def _variance_and_correlation(kernel: Tensor) -> tuple[float, float | None]:
    """Mean of the diagonal, and mean off-diagonal entry over it."""
    variance, n = float(kernel.diagonal().mean()), len(kernel)
    if n < 2:
        return variance, None
    covariance = float(kernel.sum() - kernel.diagonal().sum()) / (n * (n - 1))
    return variance, covariance / variance if variance > 0 else 0.0


def _depends_on_draws(v: Variable, known: dict[int, bool]) -> bool:
    if v.number not in known:
        parents = (_depends_on_draws(parent, known) for parent in v.parents)
        known[v.number] = isinstance(v, Sampled) or any(parents)
    return known[v.number]


def _paths(graph: Graph) -> dict[int, str]:
    """Operation -> path of the innermost submodule that contains it."""
    spans: dict[str, int] = {}
    paths: dict[int, str] = {}
    for path, side, _, at in graph.boundaries:
        if side == "input":
            spans[path] = at
        elif path in spans:
            for index in range(spans.pop(path), at):
                inner = paths.get(index, "")
                paths[index] = inner if len(inner) > len(path) else path
    return paths
