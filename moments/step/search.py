"""The learning rate whose first step reaches a bound, and how it moves with width and depth."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DomainError, ValidityWarning, domain_error
from ..formulas.checks import POSITIVE, check_choice, check_count, check_number
from ..model.embedding import Embedding
from ..model.transformer import Transformer
from ..model.weights import MATRICES
from ..prediction.predict import predict
from ..prediction.result import Prediction
from .result import FirstStep
from .rules import GROUPS, named_optimizer

if TYPE_CHECKING:
    import pandas as pd

QUANTITIES: dict[str, Callable[[FirstStep], float]] = {
    "relative_change": lambda step: float(step.relative_change.max()),
    "logit_change": lambda step: step.logit_change,
    "loss_drop": lambda step: -step.loss_change,
}


@dataclass(frozen=True)
class LearningRate:
    """A learning rate whose first step reaches a bound.

    Attributes:
        rate: it.
        quantity, bound: what reaches what: "relative_change" (the largest E |dh|^2/E |h|^2 along
            the stream), "logit_change" (mean square of a logit's change) or "loss_drop" (nats).
        step: the first step at that rate.
        by_group: the same where one group of parameters moves alone; empty unless asked for, inf
            where it never gets there.
    """

    rate: float
    quantity: str
    bound: float
    step: FirstStep = field(repr=False)
    by_group: Mapping[str, float] = field(default_factory=dict)


def learning_rate(
    model: Transformer | Prediction,
    optimizer: str,
    *,
    quantity: str = "relative_change",
    bound: float = 0.1,
    groups: bool = False,
    token_ids: Any = None,
    sequences: int = 2,
    seed: int = 0,
    **options: Any,
) -> LearningRate:
    """The rate at which the first step of an optimizer reaches a bound.

    It says how far a step goes, not how well training does: a step whose stream changes by .1 to 1
    is where linear theory ends and common learning rates lie (docs/theory/first-step.md).

    >>> import moments
    >>> model = moments.preset("gpt2").replace(layers=2, seq_len=16, dropout=0.0)
    >>> found = moments.learning_rate(model, "adam", bound=0.1)
    >>> round(float(found.step.relative_change.max()), 3)
    0.1

    Args:
        model: the declaration, or a prediction of a batch.
        optimizer: as in `Prediction.after`.
        quantity: "relative_change", "logit_change" or "loss_drop".
        bound: what it is to reach.
        groups: whether to find that rate for each group of parameters alone, too.
        token_ids: (L,) or (B, L) the text; None: `sequences` of the model's length by Zipf's law.
        sequences, seed: of that text.
        options: of the optimizer.

    Raises:
        DomainError: as `Prediction.after`, or no rate reaches the bound.
    """
    check_choice("quantity", quantity, tuple(QUANTITIES))
    aim = check_number("bound", bound, POSITIVE)
    named_optimizer(optimizer, **options)
    prediction = (
        model if isinstance(model, Prediction) else _read(model, token_ids, sequences, seed)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValidityWarning)
        step = _search(prediction, optimizer, quantity, aim, options)
        by_group: dict[str, float] = {}
        for group in GROUPS if groups else ():
            given = dict(options.get("multipliers") or {})
            alone = {name: (given.get(group, 1.0) if name == group else 0.0) for name in GROUPS}
            try:
                found = _search(
                    prediction, optimizer, quantity, aim, options | {"multipliers": alone}
                )
                by_group[group] = found.learning_rate
            except DomainError:
                by_group[group] = math.inf
    return LearningRate(step.learning_rate, quantity, aim, step, by_group)


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
        return predict(model, **zipf_batch(model, sequences, seed))
    return predict(
        model, token_ids=token_ids, **zipf_encoder(model, np.atleast_2d(token_ids), seed)
    )


def zipf_batch(model: Transformer, sequences: int = 2, seed: int = 0) -> dict[str, Any]:
    """What `predict` reads of a model with a token table where no text is given."""
    embedding = model.embedding
    assert isinstance(embedding, Embedding)
    words, padding = embedding.vocab_size, embedding.padding_id
    batch = {"token_ids": zipf_text(words, model.seq_len, sequences, seed, padding)}
    if model.head is not None and model.head.loss == "masked":
        # every seventh token is asked for, as good as any choice where words are random
        targets = batch["token_ids"].copy()
        targets.reshape(-1)[[k for k in range(targets.size) if k % 7]] = -100
        batch["targets"] = targets
    return batch | zipf_encoder(model, batch["token_ids"], seed)


def zipf_encoder(model: Transformer, token_ids: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """What an encoder reads beside a decoder's text: as many sequences of its own length."""
    encoder = model.encoder
    if encoder is None or not isinstance(encoder.embedding, Embedding):
        return {}
    words, padding = encoder.embedding.vocab_size, encoder.embedding.padding_id
    ids = zipf_text(words, encoder.seq_len, len(token_ids), seed + 1, padding)
    return {"encoder_inputs": {"token_ids": ids}}


def zipf_text(
    vocab_size: int, seq_len: int, sequences: int = 2, seed: int = 0, padding_id: int | None = None
) -> np.ndarray:
    """Tokens drawn by Zipf's law, the r-th word with probability proportional to 1/r; padding is no
    word."""
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
"""Learning rates that are tried."""


def _search(
    prediction: Prediction, optimizer: str, quantity: str, bound: float, options: dict[str, Any]
) -> FirstStep:
    """Secant steps in logarithms, kept inside a bracket; changes go with a power of the rate."""
    value = QUANTITIES[quantity]

    def at(log_rate: float) -> tuple[FirstStep, float]:
        step = prediction.after(optimizer, math.exp(log_rate), **options)
        found = value(step)
        return step, math.log(found / bound) if found > 0 else -math.inf

    low, high = math.log(_LEAST), math.log(_MOST)
    x, slope = math.log(1e-4), 1.0 if quantity == "loss_drop" else 2.0
    last: tuple[float, float] | None = None
    most = -math.inf
    for _ in range(_TRIES):
        step, gap = at(x)
        if gap == -math.inf and most == -math.inf and last is None and x > 0:
            break  # nothing moves at all
        most = max(most, gap)
        if abs(gap) < 1e-3:
            return step
        if last is not None and x > last[0] and gap < min(last[1], 0.0):
            break  # it falls again
        if gap < 0:
            low = x
        else:
            high = x
        if last is not None and math.isfinite(gap) and x != last[0]:
            found = (gap - last[1]) / (x - last[0])
            slope = found if 0.2 < found < 4 else slope
        last = (x, gap) if math.isfinite(gap) else None
        moved = x - gap / slope if math.isfinite(gap) else x + 12.0
        moved = min(max(moved, x - 7.0), x + 12.0 if gap == -math.inf else x + 4.0)
        x = moved if low < moved < high else (low + high) / 2
        if high - low < 1e-4:
            break
    reached = bound * math.exp(most) if math.isfinite(most) else 0.0
    raise domain_error(
        "bound", bound, f"what a step of {optimizer} reaches in {quantity}", f"found {reached:.3g}"
    )


PARAMETRISATIONS = ("fixed", "standard", "mup", "depth-mup", "completep")
"""Which variances, scales and learning rates follow a size; see `parametrised`."""


def parametrised(
    model: Transformer, name: str, optimizer: str, d_model: int, layers: int
) -> tuple[Transformer, dict[str, float]]:
    """A model of another width and depth, and multipliers of the learning rate.

    With m = width over the base's and l = depth over the base's:

        fixed      nothing follows
        standard   variances of hidden matrices 1/m (an untied head's too)
        mup        besides, Adam: rates of hidden matrices 1/m; SGD: rates of tables and vectors
                   m; the logits are multiplied by 1/m and the head's entries keep their variance
                   (Yang et al. 2022, Table 8)
        depth-mup  mup, branches times l^(-1/2), and Adam's hidden and vector rates l^(-1/2)
                   (Yang et al. 2023)
        completep  mup, branches times 1/l, rates as mup's (Dey et al. 2025, alpha = 1; for Adam)

    Heads keep their width, so that attention's logits need no factor. Muon's rates do not follow
    width where its step is scaled by shape (adjust="spectral"; Jordan 2024, Bernstein 2025).

    Raises:
        DomainError: a width that is no multiple of a head's, a model of unequal layers, or
            completep for SGD or Muon, of which its authors say nothing.
    """
    if name == "completep" and optimizer in ("sgd", "muon"):
        raise domain_error("parametrisation", name, f"another one for {optimizer}: Adam's")
    check_count("d_model", d_model)
    check_count("layers", layers)
    d_head = int(model.d_head or model.d_model // model.heads)
    if d_model % d_head:
        raise domain_error("d_model", d_model, f"a multiple of a head's width, {d_head}")
    m, deeper = d_model / model.d_model, layers / model.layers
    heads = d_model // d_head
    changes: dict[str, Any] = {"d_model": d_model, "heads": heads, "layers": layers}
    if model.d_ff is not None:
        changes["d_ff"] = round(model.d_ff * m)
    if model.kv_heads not in (None, model.heads):
        changes["kv_heads"] = max(1, round((model.kv_heads or heads) * m))
    own = model.layer_weights(1)
    if any(model.layer_weights(n) != own for n in range(2, model.layers + 1)):
        raise domain_error("weights", "by layer", "alike in all layers, to be scaled")
    hidden = 1.0 if name == "fixed" else 1 / m
    # A Transformer's weights are never None once it is made.
    changes["weights"] = type(model.weights)(  # type: ignore[misc]
        **{matrix: getattr(own, matrix) * hidden for matrix in MATRICES},
        distribution=model.weights.distribution,  # type: ignore[union-attr]
    )
    head = model.head
    multipliers: dict[str, float] = {}
    if name == "standard" and not head.tied and head.weight_variance is not None:
        head = head.replace(weight_variance=head.weight_variance / m)
    if name in ("mup", "depth-mup", "completep"):
        head = head.replace(output_scale=head.output_scale / m)
        if optimizer == "sgd":
            multipliers = {"embedding": m, "vectors": m, "head": m}
        elif optimizer != "muon":
            multipliers = {"matrices": 1 / m}
        power = {"mup": 0.0, "depth-mup": 0.5, "completep": 1.0}[name]
        scales = model.by_block("branch_scale")
        changes["branch_scale"] = float(scales[0, 0]) * deeper**-power
        if name == "depth-mup" and optimizer not in ("sgd", "muon"):
            multipliers["matrices"] = multipliers.get("matrices", 1.0) * deeper**-0.5
            multipliers["vectors"] = deeper**-0.5
    changes["head"] = head
    return model.replace(**changes), multipliers


@dataclass(frozen=True, eq=False)
class Transfer:
    """Learning rates along width or depth under one parametrisation.

    Attributes:
        parametrisation, optimizer, quantity, bound: what was asked.
        along: "d_model" or "layers".
        sizes: its values.
        rates: where the bound is reached, the parametrisation's factors applied.
        exponents: d log rate/d log size between neighbours.
    """

    parametrisation: str
    optimizer: str
    quantity: str
    bound: float
    along: str
    sizes: tuple[int, ...]
    rates: tuple[float, ...]

    @property
    def exponents(self) -> tuple[float, ...]:
        logs = np.diff(np.log(self.rates)) / np.diff(np.log(self.sizes))
        return tuple(float(value) for value in logs)

    def to_frame(self) -> pd.DataFrame:
        """One row per size: the size, rate and exponent to the next."""
        import pandas as pd

        return pd.DataFrame(
            {self.along: self.sizes, "rate": self.rates, "exponent": (*self.exponents, np.nan)}
        )


def transfer(
    model: Transformer,
    optimizer: str,
    *,
    parametrisation: str = "standard",
    widths: Sequence[int] | None = None,
    depths: Sequence[int] | None = None,
    quantity: str = "relative_change",
    bound: float = 0.1,
    sequences: int = 2,
    seed: int = 0,
    **options: Any,
) -> Transfer:
    """How the rate of `learning_rate` moves with width or depth: flat where it transfers.

    Args:
        model: the base, at which every parametrisation is the model itself.
        optimizer: as in `Prediction.after`.
        parametrisation: "fixed" (variances as they are), "standard" (hidden variances by 1/width),
            "mup", "depth-mup" or "completep"; see `parametrised`.
        widths, depths: values of d_model (multiples of a head's width) or of layers; one of them.
        quantity, bound, sequences, seed, options: as in `learning_rate`.

    Raises:
        DomainError: both or neither of widths and depths, or a parametrisation that the optimizer
            has none of.
    """
    check_choice("parametrisation", parametrisation, PARAMETRISATIONS)
    if (widths is None) == (depths is None):
        raise DomainError("give widths or depths, and not both")
    sizes = tuple(widths if widths is not None else depths or ())
    given = dict(options.pop("multipliers", None) or {})
    rates = []
    for size in sizes:
        width = size if widths is not None else model.d_model
        depth = size if depths is not None else model.layers
        scaled, factors = parametrised(model, parametrisation, optimizer, width, depth)
        multipliers = factors | {
            name: factors.get(name, 1.0) * value for name, value in given.items()
        }
        found = learning_rate(
            scaled,
            optimizer,
            quantity=quantity,
            bound=bound,
            sequences=sequences,
            seed=seed,
            multipliers=multipliers,
            **options,
        )
        rates.append(found.rate)
    along = "d_model" if widths is not None else "layers"
    return Transfer(parametrisation, optimizer, quantity, bound, along, sizes, tuple(rates))
