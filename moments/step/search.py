"""Learning rates: the onset of instability, the range to search, the size of a first step."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DomainError, ValidityWarning, domain_error
from ..files import Serialised
from ..formulas.checks import POSITIVE, check_choice, check_count, check_number
from ..model.embedding import Embedding
from ..model.transformer import Transformer
from ..prediction.predict import predict
from ..prediction.result import Prediction
from .result import FirstStep
from .rules import GROUPS, named_optimizer
from .sharpness import OPTIMIZERS as SHARP
from .sharpness import Sharpness

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUANTITIES: dict[str, Callable[[FirstStep], float]] = {
    "relative_change": lambda step: float(step.relative_change.max()),
    "logit_change": lambda step: step.logit_change,
    "loss_drop": lambda step: -step.loss_change,
}


DAMAGED = {("adam", "pre"): 0.35, ("adam", "post"): 0.04}
"""Least constant rate whose loss after 300 steps is .1 nat above that of the best rate, over the
edge of stability, by optimizer and placement of norms: geometric means over the calibration
modules. docs/theory/sharpness.md lists these and the validation modules."""

SEARCH: dict[tuple[str, str], tuple[float, float]] = {
    ("adam", "pre"): (0.18, 0.26),
    ("adam", "post"): (0.02, 0.04),
    ("sgd", "pre"): (2.6, 8.1),
}
"""Best constant rates over the edge of stability, least and largest of the same modules."""

ONSET = 0.46
"""Least constant rate of Adam at which the loss on one batch rises at all within 25 steps, over the
edge of stability: geometric mean of the same modules, four draws of each."""

WARMED = 1.5
"""Ratio of the rates at which training is damaged with and without a warm-up of 50 steps: geometric
mean of the same modules."""

NOT_PLAIN = (
    "where to search and what is damaged were measured on plain attention and feed-forward blocks "
    "alone, and this model has "
)

SGD_NOTE = "where sgd is damaged is not known: on four models from 3.5 to 19 times the edge on"


def edge_of_stability(optimizer: str, largest: float, **options: Any) -> float:
    """The constant rate above which an optimizer diverges on a quadratic of that curvature.

    Gradient descent's is 2/largest; with momentum m it is (1 + m) times that, by Nesterov
    (1 + m)/(1 + 2 m) times (Cohen et al. 2021, Gradient descent on neural networks typically occurs
    at the edge of stability, appendix B). Adam averages gradients with weight 1 - beta_1:
    2 (1 + beta_1)/(1 - beta_1)/largest, of the preconditioned Hessian (Cohen et al. 2022, Adaptive
    gradient methods at the edge of stability, proposition 1).
    """
    if optimizer == "sgd":
        momentum = float(options.get("momentum") or 0.0)
        slower = 1.0 + 2.0 * momentum if options.get("nesterov") else 1.0
        return 2.0 * (1.0 + momentum) / slower / largest
    beta = float((options.get("betas") or (0.9, 0.999))[0])
    return 2.0 * (1.0 + beta) / (1.0 - beta) / largest


_DESCRIPTIONS = {
    "relative_change": "changes the residual stream by {} of its mean square",
    "logit_change": "changes logits by {} (mean square)",
    "loss_drop": "lowers the loss by {} nats",
}


@dataclass(frozen=True, eq=False, repr=False)
class LearningRate(Serialised):
    """Learning rates at which a model trains, and the size of one step.

    docs/theory/sharpness.md has the derivation and the measured errors.

    Attributes:
        optimizer: name of the optimizer.
        edge: `edge_of_stability` of the loss at initialisation; None if the curvature is not known.
        onset: least constant rate at which the loss of repeated steps on one batch rises within 25
            steps; a measured multiple of the edge, or None if that is not known.
        first_instability: least constant rate at which training is damaged, that is, ends above
            the best loss; a measured multiple of the edge, or None (`warnings` has the reason).
        first_instability_with_warmup: the same after a linear warm-up of `warmup` steps.
        range: (low, high), constant rates to search, or None.
        warmup: steps of a linear warm-up to `first_instability_with_warmup` whose first step has a
            rate of at most `step_size`, or None.
        limited_by: parameters with their shares in the curvature, the largest first.
        step_size: rate at which the first step's `quantity` is `bound`.
        quantity, bound: "relative_change" (the largest E |dh|^2/E |h|^2 along the stream),
            "logit_change" (mean square of a logit's change) or "loss_drop" (nats), and its value.
        step: the first step at that rate.
        by_group: `step_size` if only one group of parameters moves, by group, without those that
            never reach the bound; empty unless requested.
        sharpness: extreme eigenvalues of the (preconditioned) Hessian, or None.
        warnings: violated limits of validity.
    """

    optimizer: str
    edge: float | None
    onset: float | None
    first_instability: float | None
    first_instability_with_warmup: float | None
    range: tuple[float, float] | None
    warmup: int | None
    limited_by: Mapping[str, float]
    step_size: float
    quantity: str
    bound: float
    step: FirstStep
    by_group: Mapping[str, float]
    sharpness: Sharpness | None
    warnings: tuple[str, ...]
    _after: Callable[[float], FirstStep]

    def losses(self, rates: Sequence[float]) -> np.ndarray:
        """The batch's loss after one step at each of several rates, in nats."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ValidityWarning)
            return np.array([self._after(float(rate)).loss for rate in rates])

    def table(self) -> str:
        """Three lines: rates to search, the onset of instability, the size of a step."""
        lines: list[tuple[str, str, str]] = []
        if self.range is not None:
            low, high = self.range
            lines.append(("search", f"{low:.2g} to {high:.2g}", "constant rates"))
        limits = [f"{name} {100 * share:.0f} %" for name, share in self.limited_by.items()][:4]
        limited = f"limited by {', '.join(limits)}"
        if self.first_instability is not None:
            steps = f"{self.warmup} step{'s' * (self.warmup != 1)}"
            warm = f"from {self.first_instability_with_warmup:.2g} after {steps}"
            comment = f"within a factor 2 mostly; {warm} of warm-up (a rule of thumb); "
            comment += f"the loss on one batch rises from {self.onset:.2g}; {limited}"
            lines.append(("unstable", f"from {self.first_instability:.2g}", comment))
        elif self.edge is not None:
            lines.append(("edge", f"{self.edge:.2g}", f"leaves the first quadratic; {limited}"))
        lines.append(
            (
                "one step",
                f"{self.step_size:.2g}",
                _DESCRIPTIONS[self.quantity].format(f"{self.bound:g}"),
            )
        )
        lines += [("", f"{rate:.2g}", f"{group} alone") for group, rate in self.by_group.items()]
        first, second = (max(len(line[k]) for line in lines) for k in (0, 1))
        words = [f"{name:{first}}  {value:{second}}  {comment}" for name, value, comment in lines]
        return "\n".join([f"learning rates of {self.optimizer}", *words, *self.warnings])

    def plot(self, name: str | None = None) -> Figure:
        """The loss after one step over rates, with the range to search and its end."""
        from ..show.plot import plot_learning_rate

        return plot_learning_rate(self, name)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, with a format version."""
        names = ["optimizer", "edge", "onset"]
        names += ["first_instability", "first_instability_with_warmup"]
        more = ("step_size", "quantity", "bound")
        return {
            "format": 3,
            **{name: getattr(self, name) for name in names},
            "warmup": self.warmup,
            "range": None if self.range is None else list(self.range),
            "limited_by": dict(self.limited_by),
            **{name: getattr(self, name) for name in more},
            "by_group": dict(self.by_group),
            "warnings": list(self.warnings),
        }

    def __repr__(self) -> str:
        where = "range not known"
        if self.range is not None:
            low, high = self.range
            where = f"search {low:.2g} to {high:.2g}, edge at {self.edge:.2g}"
        return f"LearningRate({self.optimizer}: {where}, step size {self.step_size:.2g})"


def learning_rate(
    model: Transformer | Prediction,
    optimizer: str,
    token_ids: Any = None,
    *,
    quantity: str = "relative_change",
    bound: float = 0.1,
    groups: bool = False,
    sequences: int = 2,
    seed: int = 0,
    **options: Any,
) -> LearningRate:
    """Constant rates to search, the onset of instability, and the size of a first step.

    All but the step size are multiples of the edge of stability at initialisation; nothing is run
    or trained. docs/theory/sharpness.md has their errors in real training.

    >>> import moments
    >>> model = moments.preset("gpt2").replace(layers=2, seq_len=16, dropout=0.0)
    >>> rates = moments.learning_rate(model, "adam")
    >>> low, high = rates.range
    >>> rates.step_size < low < high < rates.first_instability
    True

    Args:
        model: the declaration, or a prediction of a batch.
        optimizer: as in `Prediction.after`. For "lion", "sign" and "muon" only the step size is
            known.
        token_ids: (L,) or (B, L) the text; None: `sequences` drawn by Zipf's law, of the model's
            length or shorter, 256 tokens in total.
        quantity: quantity that defines the step size: "relative_change", "logit_change" or
            "loss_drop".
        bound: its value.
        groups: whether to compute the step size of each group of parameters alone, too.
        sequences, seed: of the drawn text; the seed also of the drawn network.
        options: of the optimizer.

    Returns:
        A LearningRate: `range`, `first_instability`, `warmup`, `step_size`, `table()`, `plot()`.

    Raises:
        DomainError: as in `Prediction.after`, or no rate reaches the bound.
    """
    check_choice("quantity", quantity, tuple(QUANTITIES))
    aim = check_number("bound", bound, POSITIVE)
    named_optimizer(optimizer, **options)
    prediction = (
        model if isinstance(model, Prediction) else _read(model, token_ids, sequences, seed)
    )
    first, notes = _first_tokens(prediction)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValidityWarning)
        step = _search(first, optimizer, quantity, aim, options)
        by_group: dict[str, float] = {}
        for group in GROUPS if groups else ():
            given = dict(options.get("multipliers") or {})
            alone = {name: (given.get(group, 1.0) if name == group else 0.0) for name in GROUPS}
            with contextlib.suppress(DomainError):
                moved = _search(first, optimizer, quantity, aim, options | {"multipliers": alone})
                by_group[group] = moved.learning_rate
    curvature, more = _curvature(prediction, optimizer, seed, options)
    notes += more
    edge = onset = unstable = with_warmup = bracket = steps = None
    shares: dict[str, float] = {}
    if curvature is not None:
        edge = edge_of_stability(optimizer, curvature.largest, **options)
        case = optimizer.removesuffix("w"), prediction.model.norm
        if case in SEARCH:
            low, high = SEARCH[case]
            bracket = low * edge, high * edge
            blocks = (*prediction.model.mixers, *prediction.model.ffns)
            if others := sorted({one.kind for one in blocks if one is not None}):
                notes += (NOT_PLAIN + ", ".join(others),)
        else:
            notes += (f"where to search under {optimizer} is not known of norm = {case[1]!r}",)
        if case in DAMAGED:
            onset, unstable = ONSET * edge, DAMAGED[case] * edge
            with_warmup = WARMED * unstable
            steps = max(1, math.ceil(with_warmup / step.learning_rate))
        elif case in SEARCH:
            notes += (SGD_NOTE,)
        for _, name, share in curvature.shares:
            shares[name] = shares.get(name, 0.0) + share
    return LearningRate(
        optimizer=optimizer,
        edge=edge,
        onset=onset,
        first_instability=unstable,
        first_instability_with_warmup=with_warmup,
        range=bracket,
        warmup=steps,
        limited_by=dict(sorted(shares.items(), key=lambda one: -one[1])),
        step_size=step.learning_rate,
        quantity=quantity,
        bound=aim,
        step=step,
        by_group=by_group,
        sharpness=curvature,
        warnings=notes,
        _after=lambda rate: first.after(optimizer, rate, **options),
    )


def _curvature(
    prediction: Prediction, optimizer: str, seed: int, options: Mapping[str, Any]
) -> tuple[Sharpness | None, tuple[str, ...]]:
    """The sharpness, or None, and notes."""
    if optimizer not in SHARP:
        return None, (f"where {optimizer} becomes unstable is not known, of sgd and adam alone",)
    given = {name: options[name] for name in ("eps", "clip", "multipliers") if name in options}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ValidityWarning)
        try:
            value = prediction.sharpness(optimizer, seed=seed, draws=1, **given)
        except DomainError as error:
            return None, (f"unstable rates are not known: {error}",)
    return value, tuple(str(one.message) for one in caught)


MOST_TOKENS = 256
"""Number of tokens of a drawn text, and of a longer one for which the step size is computed."""


def _first_tokens(prediction: Prediction) -> tuple[Prediction, tuple[str, ...]]:
    """The prediction, or one of its first tokens if it has more than twice `MOST_TOKENS`; notes."""
    given = {name: value for name, value in prediction.asked.items() if value is not None}
    ids = np.atleast_2d(given.get("token_ids", ()))
    # per-token arguments besides the text itself, and an encoder's, are not cut
    plain = prediction.model.encoder is None and not {"targets", "segment_ids"} & set(given)
    if ids.size <= 2 * MOST_TOKENS or not plain or "steps" in given:
        return prediction, ()
    length = min(ids.shape[1], MOST_TOKENS)
    ids = ids[: MOST_TOKENS // length, :length]
    model = prediction.model.replace(seq_len=length)
    note = f"one step is that of the first {ids.size} tokens"
    return predict(model, token_ids=ids), (note,)


def _read(model: Any, token_ids: Any, sequences: int, seed: int) -> Prediction:
    if not isinstance(model, Transformer):
        kind = type(model).__name__
        raise DomainError(f"model must be a moments.Transformer or a Prediction, not {kind}")
    if token_ids is None:
        if not isinstance(model.embedding, Embedding):
            raise DomainError(
                "a first step is that of a batch: pass a prediction of pixels and targets, or "
                "declare model.embedding with a token table"
            )
        few = max(1, MOST_TOKENS // check_count("sequences", sequences))
        if model.seq_len > few and model.encoder is None:
            model = model.replace(seq_len=few)
        return predict(model, **zipf_batch(model, sequences, seed))
    return predict(
        model, token_ids=token_ids, **zipf_encoder(model, np.atleast_2d(token_ids), seed)
    )


def zipf_batch(model: Transformer, sequences: int = 2, seed: int = 0) -> dict[str, Any]:
    """Arguments of `predict` for a model with a token table: a text drawn by Zipf's law."""
    embedding = model.embedding
    assert isinstance(embedding, Embedding)
    words, padding = embedding.vocab_size, embedding.padding_id
    batch = {"token_ids": zipf_text(words, model.seq_len, sequences, seed, padding)}
    if model.head is not None and model.head.loss == "masked":
        # every seventh token is masked: any choice is as good, as words are independent
        targets = batch["token_ids"].copy()
        targets.reshape(-1)[[k for k in range(targets.size) if k % 7]] = -100
        batch["targets"] = targets
    return batch | zipf_encoder(model, batch["token_ids"], seed)


def zipf_encoder(model: Transformer, token_ids: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """The argument `encoder_inputs` of `predict`: as many sequences as the decoder has."""
    encoder = model.encoder
    if encoder is None or not isinstance(encoder.embedding, Embedding):
        return {}
    words, padding = encoder.embedding.vocab_size, encoder.embedding.padding_id
    ids = zipf_text(words, encoder.seq_len, len(token_ids), seed + 1, padding)
    return {"encoder_inputs": {"token_ids": ids}}


def zipf_text(
    vocab_size: int, seq_len: int, sequences: int = 2, seed: int = 0, padding_id: int | None = None
) -> np.ndarray:
    """Tokens drawn by Zipf's law, the r-th word with probability proportional to 1/r, without
    padding."""
    check_count("sequences", sequences)
    check_count("seed", seed, least=0)
    words = np.arange(vocab_size)
    if padding_id is not None:
        words = words[words != padding_id]
    weights = 1.0 / np.arange(1, len(words) + 1)
    rng = np.random.default_rng(seed)
    return rng.choice(words, (sequences, seq_len), p=weights / weights.sum())


_TRIES = 20

_LEAST, _MOST = 1e-12, 1e6
"""Range of learning rates."""


def _search(
    prediction: Prediction, optimizer: str, quantity: str, bound: float, options: dict[str, Any]
) -> FirstStep:
    """The step at which `quantity` is `bound`, by secant steps in logarithms inside a bracket, from
    a rate so small that changes are a power of it."""
    value = QUANTITIES[quantity]

    def at(log_rate: float) -> tuple[FirstStep, float]:
        step = prediction.after(optimizer, math.exp(log_rate), **options)
        size = value(step)
        return step, math.log(size / bound) if size > 0 else -math.inf

    low, high = math.log(_LEAST), math.log(_MOST)
    x, slope = math.log(1e-6), 1.0 if quantity == "loss_drop" else 2.0
    last: tuple[float, float] | None = None
    most = -math.inf
    for _ in range(_TRIES):
        step, gap = at(x)
        if gap == -math.inf and most == -math.inf and last is None and x > 0:
            break  # no parameter moves
        most = max(most, gap)
        if abs(gap) < 1e-3:
            return step
        if last is not None and x > last[0] and gap < min(last[1], 0.0):
            break  # the quantity decreases again
        if gap < 0:
            low = x
        else:
            high = x
        if last is not None and math.isfinite(gap) and x != last[0]:
            secant = (gap - last[1]) / (x - last[0])
            slope = secant if 0.2 < secant < 4 else slope
        moved = x - gap / slope if math.isfinite(gap) else x + 12.0
        if last is not None:
            moved = min(max(moved, x - 7.0), x + 12.0 if gap == -math.inf else x + 4.0)
        last = (x, gap) if math.isfinite(gap) else None
        x = moved if low < moved < high else (low + high) / 2
        if high - low < 1e-4:
            break
    reached = bound * math.exp(most) if math.isfinite(most) else 0.0
    raise domain_error(
        "bound", bound, f"what a step of {optimizer} reaches in {quantity}", f"found {reached:.3g}"
    )
