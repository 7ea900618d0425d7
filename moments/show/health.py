"""Rules that judge a network at initialisation, and the check of a declaration.

Every rule is about a consequence for training, which gives its bound without any data. A rule reads
measured numbers if a module was run, else predicted ones.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import from_huggingface
from ..errors import domain_error, listed, without_warnings
from ..layers.experts.mixture import TOKENS
from ..layers.recurrent.leaf import Mixer
from ..model.experts import Experts
from ..model.mixers import Absent
from ..model.patches import PatchEmbedding
from ..model.presets import preset
from ..model.streams import HyperConnections
from ..model.transformer import Transformer
from ..noise.band import NORMAL_95
from ..prediction.predict import predict
from ..prediction.resolution import at_default_length
from .expected import TOLERANCE, point_log_variance
from .findings import Finding, Report, Row, stream_row
from .precision import FORMATS, precision
from .recognition import Weight, in_words, recognise, weights_of
from .verdict import NAMES, class_count, times

if TYPE_CHECKING:
    import pandas as pd

    from ..prediction.result import Prediction
    from .comparison import Comparison

BY_CHANCE = 1e-3
"""Probability that chance decides any rule on a correct network: a number is judged by its
expectation, unless the draw is further from it than this allows over all numbers (Bonferroni)."""

LOSS = 2.0
"""Nats by which a first loss may exceed log(vocabulary). Logits of variance v add v/2: published
models of width 8192 drawn with std 0.02 have 1.6. Training on a larger loss first shrinks the
logits before anything is learned."""

COLLAPSED = 0.99
"""Token correlation above which tokens count as alike: the difference of two tokens is then less
than a seventh of their size, |x_i - x_j|^2 = 2 (1 - r) v."""

IDENTITY = 1e-4
"""Variance added by a layer, relative to its input, below which it acts as the identity: it changes
its input by 1 % of its size, a hundred such layers in independent directions by a tenth."""

GRADIENT = 1e6
"""Factor between first and last layer of (gradient variance) x (signal variance), either way. That
product does not depend on the units of the stream, which a norm divides out. At a thousand in size
no single learning rate or clipping norm can serve both ends."""

POSITIONS = 0.95
"""Share of positions in the variance that enters layer 1, above which tokens differ by a
twentieth of it."""

PEAKED = 0.5
"""E sum_j (a_ij - 1/n)^2 of attention weights above which a row reads about one key: half of the
value for a single key."""

EPSILON = 0.1
"""Share of a norm's epsilon in the variance it divides by, at which its output is 5 % smaller."""

LARGEST_EPSILON = 1e-3
"""Largest epsilon of released models and frameworks: Keras's default. Others use 1e-12 to 1e-5."""

LARGE = 100.0
"""Ratio of token variance to matrix variance above which identity layers are blamed on the token
table: ten times the matrices' std."""

STARVED = 0.5
"""Part of the experts with less than a tenth of an even share, above which it is reported."""

COPIES = 0.9999
"""The same at every block, above which streams are called copies."""

ALIKE = 0.99
"""Correlation of two residual streams after the last layer, above which it is reported."""

OVERFLOW = 1e-9
"""Share of entries beyond a format's range that is reported: one per step of a large model."""


# --- numbers --------------------------------------------------------------------------------------


def stream_numbers(prediction: Prediction, comparison: Comparison | None) -> Iterator[Row]:
    """Rows for both ends of the stream, the loss and the logits."""
    model = prediction.model
    ends = (("entering layer 1", 0), (f"leaving layer {model.layers}", model.layers))
    points: dict[tuple[str, int], Any] = {}
    if comparison is not None:
        frame = comparison.points()
        rows = frame[frame["stack"] == ""].to_dict("records")
        points = {(str(row["quantity"]), int(row["layer"])): row for row in rows}
    for name, words in NAMES.items():
        for where, n in ends:
            if points:
                row = points[name, n]
                numbers = (float(row[key]) for key in ("measured", "predicted", "low", "high"))
                seen, expected, *band = numbers
                yield stream_row(f"{words} {where}", seen, expected, band, bool(row["inside"]))
            else:
                expected, band = float(getattr(prediction, name)[n]), [math.nan, math.nan]
                if name == "grad_variance" and prediction.states_draws:
                    band = prediction.grad_variance_band[:, n].tolist()
                yield stream_row(f"{words} {where}", math.nan, expected, band)
    measured: Any = None if comparison is None else comparison.measurement
    for where, n in ends:
        seen = math.nan if measured is None else float(measured.correlation[n])
        yield stream_row(f"token correlation {where}", seen, float(prediction.correlation[n]))
    yield from _outputs(prediction, measured)


def _outputs(prediction: Prediction, measured: Any) -> Iterator[Row]:
    vocab = class_count(prediction.model)
    loss, logits = getattr(measured, "loss", None), getattr(measured, "logit_variance", None)
    seen = math.nan if loss is None else float(loss)
    if prediction.loss is not None:
        expected, error = float(prediction.loss), NORMAL_95 * float(prediction.loss_stderr or 0.0)
        yield stream_row("loss", seen, expected, (expected - error, expected + error))
    if vocab is not None:
        yield stream_row(f"loss against log({vocab})", seen, math.log(vocab))
    if prediction.logit_variance is not None:
        seen = math.nan if logits is None else float(logits)
        yield stream_row("mean squared logit", seen, float(prediction.logit_variance))


def first_outlier(points: pd.DataFrame, given: str) -> tuple[int, float, float, str]:
    """The first of `Comparison.outliers`, a forward one if there is any: its layer, measured and
    predicted number, and a sentence that compares it with what is `given`."""
    first = points[points["quantity"] == "variance"]
    row: Any = (first.iloc[0] if len(first) else points.iloc[-1]).to_dict()
    layer, measured, predicted = int(row["layer"]), float(row["measured"]), float(row["predicted"])
    where = f"leaving layer {layer}" if layer else "entering layer 1"
    words = f"the {NAMES[row['quantity']]} {where} is {measured / predicted:.3g} times what the "
    words += f"{given} ({row['deviations']:+.1f} standard deviations)"
    return layer, measured, predicted, words


# --- rules ----------------------------------------------------------------------------------------


class Evidence(NamedTuple):
    """What the rules read: the prediction for the network's own weights, its comparison with a
    measurement (if any), the user's names of tensors by role, the network as its author intends it
    (if known), and the parameters' dtype."""

    prediction: Prediction
    comparison: Comparison | None
    names: Mapping[str, tuple[str, ...]]
    intended: Transformer | None = None
    dtype: str = "float32"

    @property
    def source(self) -> Any:
        """The measurement if there is one, else the prediction."""
        return self.prediction if self.comparison is None else self.comparison.measurement

    def of(self, *roles: str) -> tuple[str, ...]:
        """Names of the tensors with these roles."""
        return tuple(name for role in roles for name in self.names.get(role, ()))


def rules(seen: Evidence) -> tuple[list[Finding], list[str]]:
    """Apply every rule; return findings and notes."""
    every = (
        *(_loss, _collapse, _identity, _gradient, _tables, _final_norm, _attention, _number_format),
        *(_experts, _mixers, _streams, _depth_scale),
    )
    result = [one for rule in every for one in rule(seen)]
    findings = [one for one in result if isinstance(one, Finding)]
    return findings, [one for one in result if isinstance(one, str)]


RuleOutput = Iterator[Finding | str]


def _loss(seen: Evidence) -> RuleOutput:
    model, source = seen.prediction.model, seen.source
    vocab = class_count(model)
    if source.loss is None or vocab is None or model.head is None:
        return
    loss, uniform = float(source.loss), math.log(vocab)
    judged = loss
    if seen.prediction.loss is not None:
        scatter = float(seen.prediction.loss_stderr or 0.0)
        judged = float(judged_numbers(seen, loss, float(seen.prediction.loss), scatter))
    if judged - uniform <= LOSS:
        return
    logits = source.logit_variance
    of = "token" if model.head.tied else "head"
    names = seen.of(of) or seen.of("token") or (of,)
    width = model.d_model * (model.head.output_scale or 1.0) ** 2
    more = "" if logits is None else f"; logits have a mean square of {float(logits):.3g}, not 1"
    more += ", and the head is the token table itself" if model.head.tied else ""
    why = f"the first loss is {loss:.3g}, {loss / uniform:.3g} times that of guessing, "
    why += f"log({vocab}) = {uniform:.3g}{more}: the first steps will only shrink the logits"
    mend = f"draw {of} with a std of at most 1/sqrt(d_model) = {width**-0.5:.2g}, or scale the "
    mend += "logits down to a mean square of 1"
    severity = "error" if judged > 2 * uniform else "warning"
    yield Finding(severity, "initial loss", names, (), loss, uniform, why, mend)


def judged_numbers(seen: Evidence, measured: Any, expected: Any, deviation: Any) -> np.ndarray:
    """The numbers that a rule judges: the expected ones unless this draw contradicts them.
    `deviation` is the std of one draw about the expected number, nan if not known."""
    from scipy.special import ndtri

    numbers = 1 + seen.prediction.model.layers  # the loss, and what every layer adds
    far = -float(ndtri(BY_CHANCE / (2 * numbers))) * np.asarray(deviation)
    near = np.abs(np.subtract(measured, expected)) <= far
    return np.asarray(np.where(near, expected, measured))


def _collapse(seen: Evidence) -> RuleOutput:
    correlation = np.asarray(seen.source.correlation)
    alike = np.flatnonzero(correlation > COLLAPSED)
    if alike.size == 0 or seen.prediction.model.seq_len < 2:
        return
    first = int(alike[0])
    layers = tuple(int(n) for n in alike if n)
    where, names = "before layer 1", seen.of("token", "position")
    mend = "give token embeddings a larger share of the input of layer 1"
    if first:
        where, names = f"after layer {first}", seen.of("output", "ffn_out")[:2]
        mend = "scale attention's output down against the skip connection (a depth scale), or "
        mend += "place the norm before the block"
    worst, expected = float(correlation[first]), float(seen.prediction.correlation[first])
    why = f"{where} tokens are indistinguishable: their correlation is {worst:.4f}, above "
    why += f"{COLLAPSED:g}, and {float(correlation[-1]):.4f} at the last layer, so that attention "
    why += "has nothing to choose between"
    yield Finding("warning", "tokens alike", names, layers, worst, expected, why, mend)


_OUTPUTS = ("post_norm", "dropout", "projection", "out")
"""Sites after which a block's output enters its residual sum, the last one first."""


def added_variance(seen: Evidence) -> np.ndarray:
    """Variance added by the blocks of every layer, relative to the layer's input, (N,); nan where
    the sites are not known."""
    p, source = seen.prediction, seen.source
    skip, branch = (p.model.by_block(name) ** 2 for name in ("skip_scale", "branch_scale"))
    frame = source.to_frame()
    rows = {
        (int(r["layer"]), str(r["site"])): float(r["variance"]) for r in frame.to_dict("records")
    }
    points = {(point.layer, point.site): point for point in p.trace.points}
    result = np.full((3, p.model.layers), np.nan)  # this draw's, as expected, and how sure that is
    for n in range(1, p.model.layers + 1):
        seen_share, wanted, noise = 0.0, 0.0, 0.0
        for column, block in enumerate(("attention", "ffn")):
            keys = [(n, f"{block}.{site}") for site in _OUTPUTS]
            key = next((key for key in keys if key in rows), None)
            factor = branch[n - 1, column] / max(skip[n - 1, column], 1e-300)
            point = points.get(key) if key is not None else None
            seen_share += factor * (math.nan if key is None else rows[key])
            mean = math.nan if point is None else factor * float(p.layout.moments(point)[1])
            wanted += mean
            if point is not None and mean:
                noise += mean**2 * point_log_variance(p, point)
        entering = p.trace.stream()[n - 1]
        before = float(source.variance[n - 1]), float(p.variance[n - 1])
        if before[0] and before[1]:
            spread = noise / wanted**2 if wanted else 0.0
            spread += point_log_variance(p, entering) + TOLERANCE**2
            result[:, n - 1] = seen_share / before[0], wanted / before[1], math.sqrt(spread)
    measured, expected, deviation = result
    return judged_numbers(seen, measured, expected, deviation * expected)


BY_DESIGN = "layers are the identity at step 0, by design: the output matrices of blocks are zero"


def _identity(seen: Evidence) -> RuleOutput:
    ratio = added_variance(seen)
    idle = tuple(int(n) + 1 for n in np.flatnonzero(ratio < IDENTITY))
    if _swallowed(seen) or not idle:  # the first is reported as the epsilon's effect
        return
    intended, every, least = seen.intended, len(idle) == len(ratio), float(np.min(ratio))
    if bool(np.all(ratio[ratio < IDENTITY] == 0)):
        if every:
            yield BY_DESIGN
        return
    words = "every layer acts" if every else f"layers {listed(idle)} act"
    words += f" as the identity: blocks add {least:.2g} of the variance of the layer's input"
    if intended is not None and float(np.max(intended.by_block("branch_scale"))) < 0.1:
        yield f"{words}, as its scheme intends"
        return
    if (large := _large_embedding(seen, idle, least, words)) is not None:
        yield large
        return
    why = f"{words}, below {IDENTITY:g}, so that the network is little more than its embedding: "
    why += f"matrices are too small for d_model {seen.prediction.model.d_model}, or the stream is "
    why += "too large from its embedding on"
    mend = "draw matrices by their width (Xavier, 1/fan_in) instead of one std for all widths, or "
    mend += "draw the embedding tables with a smaller std"
    names = seen.of("output", "ffn_out")
    yield Finding("warning", "identity layers", names, idle, least, IDENTITY, why, mend)


def _large_embedding(
    seen: Evidence, idle: tuple[int, ...], least: float, words: str
) -> Finding | None:
    """The finding that token embeddings are so large that layers are idle; None if they are not."""
    embedding, weights = seen.prediction.model.embedding, seen.prediction.model.weights
    tokens = getattr(embedding, "token_variance", None)
    inner = float(np.median(np.asarray(weights.query))) if weights is not None else 0.0
    if embedding is None or tokens is None or not inner:
        return None
    scale = float(embedding.scale)
    entering = scale**2 * float(tokens)
    if entering <= LARGE * inner or least * entering / inner <= IDENTITY:
        return None
    size, std = math.sqrt(entering), math.sqrt(inner)
    mend = f"draw the token table with the matrices' std, {std:.3g} (nn.Embedding's own is 1)"
    if tokens <= LARGE * inner:  # the table has the std of the matrices
        mend = f"lower the factor {scale:.3g} on the embedding, or divide the blocks by less"
    reason = f"{words}, because tokens enter with a std of {size:.3g}, {size / std:.3g} times that "
    reason += "of the matrices"
    where = seen.of("token") or ("token",)
    return Finding("warning", "embedding scale", where, idle, size, std, reason, mend)


def _gradient(seen: Evidence) -> RuleOutput:
    source = seen.source
    first, last = (float(source.variance[n]) * float(source.grad_variance[n]) for n in (0, -1))
    p = seen.prediction
    wanted = times(p.variance[0] * p.grad_variance[0], p.variance[-1] * p.grad_variance[-1])
    ratio = times(first, last)
    if not last or 1 / GRADIENT <= ratio <= GRADIENT:
        return
    way = "vanishes" if ratio < 1 else "explodes"
    names: tuple[str, ...] = ()
    why = f"the gradient {way} towards the input: gradient variance times signal variance at the "
    why += f"first layer is {ratio:.2g} times that at the last, beyond a factor of {GRADIENT:g}, "
    why += "which no single learning rate can serve"
    mend = "use a scheme for depth (moments.solve), Pre-LN, or a branch scale of 1/sqrt(2N)"
    if p.model.placements[0] == "pre" and source.token_variance is not None:
        entering, back = source.token_variance[0], source.token_grad_variance[0]
        there = entering > p.model.norm_epsilon
        rest = float(np.mean(entering[there]) * np.mean(back[there])) if there.any() else 0.0
        if not there.all() and 1 / GRADIENT <= times(rest, last) <= GRADIENT:
            names = seen.of("class", "position")
            count = int(np.sum(~there))
            which = f"{count} tokens that enter" if count > 1 else "one token that enters"
            why += f". The cause is {which} as 0, which a norm divides by its epsilon alone"
            mend = "draw the class token, or its position, with std 0.02 as patches, not as zeros"
    yield Finding("warning", f"gradient {way}", names, (1,), ratio, wanted, why, mend)


def _tables(seen: Evidence) -> RuleOutput:
    embedding = seen.prediction.model.embedding
    tokens = getattr(embedding, "token_variance", None)
    if embedding is None or tokens is None:
        return
    total = float(embedding.variance)
    token = float(embedding.scale) ** 2 * float(tokens)
    positions = total - token - float(embedding.segment_variance)
    if total and positions / total > POSITIONS:
        mend = "draw positions with the std of the tokens"
        if embedding.positions == "sinusoidal":
            mend = "multiply token embeddings by sqrt(d_model), or draw them with variance 1"
        names, share = seen.of("position") or ("positions",), positions / total
        why = f"positions make up {100 * share:.1f} % of the variance that enters layer 1 "
        why += f"({positions:.3g}, tokens {token:.3g}): tokens at one position look alike"
        kind = "positions drown tokens"
        yield Finding("warning", kind, names, (), share, POSITIONS, why, mend)
    epsilon, first = seen.prediction.model.norm_epsilon, float(seen.source.variance[0])
    pre = seen.prediction.model.placements[0] == "pre"
    words = f"the norms' epsilon {epsilon:g} is {100 * times(epsilon, epsilon + first):.0f} % of "
    words += "what the first norm divides by: "
    if _swallowed(seen):
        words += f"a stream of variance {first:.2g} is not normalised"
        names, mend = seen.of("attention.norm.gain", "ffn.norm.gain"), "pass eps=1e-5 to the norms"
        numbers = epsilon, LARGEST_EPSILON
        yield Finding("warning", "norm epsilon", names, (), *numbers, words, mend)
    elif pre and first and epsilon / (epsilon + first) > EPSILON:
        yield f"{words}the stream enters with a variance of {first:.2g}"


def _swallowed(seen: Evidence) -> bool:
    """Whether the norms' epsilon is more than half of what the first one divides by, and larger
    than those in use."""
    model, first = seen.prediction.model, float(seen.source.variance[0])
    return model.placements[0] == "pre" and model.norm_epsilon > max(first, LARGEST_EPSILON)


def _final_norm(seen: Evidence) -> RuleOutput:
    model = seen.prediction.model
    if model.head is None or model.head.norm or model.head.loss is None:
        return
    if set(model.placements) != {"pre"}:
        return
    if seen.intended is not None and seen.intended.head is not None and not seen.intended.head.norm:
        yield "there is no norm between the last Pre-LN layer and the head, as intended"
        return
    growth = times(float(seen.source.variance[-1]), float(seen.source.variance[0]))
    names = seen.of("final.norm.gain", "head") or seen.of("token") or ("head",)
    why = "the head reads a Pre-LN stream that nothing normalises: its variance, and that of the "
    why += f"logits, grows with depth ({growth:.3g} times here)"
    mend = "add a norm after the last layer, and call it in forward"
    at = names, (model.layers,)
    yield Finding("warning", "no final norm", *at, growth, math.nan, why, mend)


def _attention(seen: Evidence) -> RuleOutput:
    frame = seen.prediction.attention()
    peaked = frame[frame["distance_to_uniform"] > PEAKED]
    if len(peaked):
        layers = tuple(int(n) for n in peaked["layer"])
        worst, names = float(peaked["logit_variance"].max()), seen.of("query", "key")
        why = "attention starts on a single key: logits within a row have a variance of "
        why += f"{worst:.3g}, not 1, so that the softmax passes no gradient to queries and keys"
        mend = "divide q k by sqrt(d_head), draw query and key with a smaller std, or normalise "
        mend += "them"
        yield Finding("warning", "attention saturated", names, layers, worst, 1.0, why, mend)


def _number_format(seen: Evidence) -> RuleOutput:
    """Check the format that the parameters have, and bf16, which has the range of float32."""
    frame = precision(seen.prediction)
    for form in FORMATS:
        used = seen.dtype == form.name
        rows = frame[frame["format"] == form.title]
        over = rows[rows["overflow"] > OVERFLOW]
        if len(over) and (used or form.name == "bfloat16"):
            worst: Any = over.sort_values("overflow").iloc[-1]
            words = (
                f"{form.title} overflows at {worst['site']} of layer {int(worst['layer'])} "
                f"({worst['way']}): at a variance of {worst['variance']:.3g}, "
                f"{worst['overflow']:.2g} of the entries exceed {form.largest:g} and become inf"
            )
            mend = "keep the stream's variance in range by a norm or a residual scale"
            layer = (int(worst["layer"]),)
            numbers = float(worst["overflow"]), OVERFLOW
            yield Finding("error", "overflow", (), layer, *numbers, words, mend)
        if not used:
            continue  # `Report.precision` has all formats
        forward, back = (rows[rows["way"] == way] for way in ("forward", "gradient"))
        lost = back[back["zero"] > 0.5]
        if len(lost) and form.name != "bfloat16":
            smallest = float(back["variance"].min())
            power = max(0, math.ceil(math.log2(2.0**form.lowest / math.sqrt(smallest))))
            words = (
                f"{form.title} without loss scaling turns most gradient entries to 0 at "
                f"{len(lost)} of {len(back)} points (rms down to {math.sqrt(smallest):.2g}); a "
                f"loss scale of 2^{power} brings them into its normal range"
            )
            mend = f"scale the loss by 2^{power} (torch.amp.GradScaler), or use bf16"
            numbers = float(lost["zero"].max()), 0.5
            yield Finding("warning", "gradient underflow", (), (), *numbers, words, mend)
        flushed = forward[forward["zero"] > 0.5]
        if len(flushed):
            worst = flushed.sort_values("zero").iloc[-1]
            yield (
                f"unscaled {form.title} turns {100 * worst['zero']:.0f} % of the entries at "
                f"{worst['site']} of layer {int(worst['layer'])} to 0"
            )


def _experts(seen: Evidence) -> RuleOutput:
    """Check routers by prediction: load depends on the router's draw and tokens' correlation."""
    prediction = seen.prediction
    if not any(isinstance(block, Experts) for block in prediction.model.ffns):
        return
    frame, names = prediction.experts(), seen.of("router") or ("router",)
    still = frame[~frame["learns"]]
    if len(still):
        at = names, tuple(map(int, still["layer"]))
        why = "one expert is chosen and its gate is normalised over the chosen ones, so it is "
        why += "always 1: the router gets no gradient from the loss, only from a balancing loss"
        mend = "do not normalise gates over the chosen experts (normalised='all' or 'none'), or "
        mend += "choose two experts"
        yield Finding("error", "router cannot learn", *at, 0.0, math.nan, why, mend)
    # the share that starves by chance, since few tokens choose
    missed = (1 - frame["chosen"] / frame["experts"]) ** min(prediction.model.seq_len, TOKENS)
    starved = frame[frame["starving"] > missed + STARVED * (1 - missed)]
    if len(starved):
        worst = starved.sort_values("starving").iloc[-1]
        at, share = (names, tuple(map(int, starved["layer"]))), float(worst["starving"])
        why = f"in one draw {100 * share:.0f} % of {int(worst['experts'])} experts get less than "
        why += f"a tenth of an even share of the tokens in layer {int(worst['layer'])}, where two "
        why += f"tokens' logits correlate by {worst['logit_correlation']:.2f}, and one expert "
        why += f"gets {worst['largest_load']:.3g} times an even share: most experts are hardly "
        why += "trained"
        mend = "train with a balancing loss from the first step, or make tokens less alike by a "
        mend += "smaller attention branch or larger token embeddings"
        yield Finding("warning", "experts starve", *at, share, STARVED, why, mend)


def _streams(seen: Evidence) -> RuleOutput:
    """Check by prediction whether several residual streams differ."""
    if not isinstance(seen.prediction.model.streams, HyperConnections):
        return
    frame = seen.prediction.streams()
    last = float(frame["likeness"].iloc[-1])
    if last < ALIKE:
        return
    at = seen.of("streams"), tuple(sorted(set(map(int, frame["layer"]))))
    if float(frame["likeness"].min()) > COPIES:
        count = seen.prediction.model.streams.streams
        why = f"all {count} residual streams carry the same tensor at the start (they correlate by "
        why += f"{last:.6f}): coefficients of reading and mixing get no gradient until streams "
        why += "differ"
        mend = "nothing, if this start is intended: the network starts as one with a single stream"
        yield Finding("note", "streams stay copies", *at, last, ALIKE, why, mend)
        return
    first, mixing = float(frame["likeness"].iloc[0]), float(frame["mixing"].iloc[-1])
    why = f"two residual streams of a token correlate by {first:.3f} after the first block and by "
    why += f"{last:.3f} after the last, so that they carry little more than one: every block's "
    why += f"mixing keeps {mixing:.2f} of the variance of their differences"
    mend = "start mixing nearer to the identity (mixing='identity', or a bias on its diagonal)"
    yield Finding("warning", "streams become alike", *at, last, ALIKE, why, mend)


def _mixers(seen: Evidence) -> RuleOutput:
    """Check by prediction how fast recurrent heads forget, and whether a norm's epsilon is most of
    what it divides by."""
    stack = seen.prediction.trace.stack
    assert stack is not None
    at = {
        record.layer: law.health
        for record in stack.leaves()
        if isinstance(record.component, Mixer)
        for law in record.pullback.laws
        if hasattr(law, "health")
    }
    dead = {layer: one for layer, one in at.items() if one.share < 0.5}
    if dead:
        worst, names = min(dead.values(), key=lambda one: one.share), seen.of("mixer_norm.gain")
        said = worst.size, worst.epsilon, worst.swallows
        mend = "draw the matrices before the norm by their width (larger), or pass a smaller "
        mend += "epsilon"
        yield Finding("warning", "dead branch", names, tuple(dead), *said, mend)
    gone = {layer: one for layer, one in at.items() if one.forgotten > 0.5}
    if gone:
        worst = max(gone.values(), key=lambda one: one.forgotten)
        where = seen.of("mixer_step.bias", "rate"), tuple(gone)
        mend = "draw step biases (dt_bias) for steps of 1e-3 to 1e-1, or smaller rates (A_log)"
        numbers = worst.forgotten, 0.5
        yield Finding("warning", "forgets at once", *where, *numbers, worst.forgets, mend)


def _depth_scale(seen: Evidence) -> RuleOutput:
    """Note a depth scale made for two residual sums per layer if the stack has others."""
    model = seen.prediction.model
    if model.weights is None or model.encoder is not None:
        return
    blocks = [
        sum(not isinstance(one, Absent) for one in pair)
        for pair in zip(model.mixers, model.ffns, strict=True)
    ]
    sums = model.layers if model.parallel else sum(blocks)
    wanted = 1 / (2 * model.layers)
    if sums == 2 * model.layers:
        return
    shapes, variances = model.shapes_of(1), model.variances_of(1)
    inward = [v for name, v in variances.items() if name in shapes and "out" not in name and v > 0]
    outward = [variances[name] for name in ("output", "ffn_out") if name in shapes]
    ratios = {v / inward[0] for v in outward if inward} | set(np.ravel(model.branch_scales**2))
    if any(math.isclose(ratio, wanted, rel_tol=1e-2) for ratio in ratios):
        half = "the stream grows by half of what the scale intends; " * (sums == model.layers)
        right = "N" if half else f"{sums}"
        yield (
            f"block outputs are scaled by 1/(2 N) = 1/{2 * model.layers}, as for two sums a layer, "
            f"but there are {sums} sums: {half}the right scale here is 1/{right}"
        )


# --- declarations ---------------------------------------------------------------------------------


def is_factory(subject: Any) -> bool:
    """Whether the subject is a class or function that builds the module."""
    made = hasattr(subject, "forward") or _config(subject) or not callable(subject)
    return isinstance(subject, type) or not made


def call_factory(subject: Any) -> tuple[Any, Any]:
    """Call a factory; return the module and its batch, or None. Other subjects pass unchanged."""
    if is_factory(subject):
        seeded = not isinstance(subject, type) and _takes_seed(subject)
        subject = subject(0) if seeded else subject()
    pair = isinstance(subject, tuple) and len(subject) == 2 and hasattr(subject[0], "forward")
    return subject if pair else (subject, None)


def _takes_seed(function: Any) -> bool:
    """Whether a function requires exactly one argument, a seed."""
    with suppress(TypeError, ValueError):
        parameters = inspect.signature(function).parameters.values()
        asked = [
            p for p in parameters if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD
        ]
        return len(asked) == 1
    return False


def _config(subject: Any) -> bool:
    return hasattr(subject, "to_diff_dict") or isinstance(subject, Mapping)


def declared(subject: Any) -> tuple[Transformer, str] | None:
    """Read a subject as a declaration: (model, name), or None if it may be a module."""
    if isinstance(subject, Transformer):
        return subject, "Transformer"
    if isinstance(subject, str) and subject in preset.names():
        return at_default_length(preset(subject)), subject
    if _config(subject):
        config = subject if isinstance(subject, Mapping) else subject.to_dict()
        return at_default_length(
            from_huggingface(subject)
        ), f"config of type {config.get('model_type')!r}"
    if isinstance(subject, str | os.PathLike):
        path = Path(subject)
        alone = path.is_dir() and not any(path.glob("*.safetensors"))
        if path.suffix == ".json" or (alone and (path / "config.json").is_file()):
            return at_default_length(from_huggingface(subject)), str(subject)
    model = getattr(subject, "model", None)
    if isinstance(model, Transformer):
        return model, type(subject).__name__
    return None


def check_declared(
    model: Transformer, name: str, *, batch: Any = None, scheme: Any = None, loss: Any = None
) -> Report:
    """Check a declaration by its predictions; DomainError for a batch or a loss."""
    for argument, value in (("batch", batch), ("loss", loss)):
        if value is not None:
            raise domain_error(argument, type(value).__name__, "None: there is no module to run")
    meant = None
    if isinstance(scheme, str):
        with without_warnings():
            meant = model.with_scheme(scheme)
    elif scheme is not None:
        meant = scheme if isinstance(scheme, Transformer) else scheme.model
    inputs: dict[str, Any] = {}
    notes = []
    if isinstance(model.embedding, PatchEmbedding):
        inputs = {"variance": 1.0, "correlation": 0.0}
        notes.append("the input of layer 1 is assumed to have variance 1 and no token correlation")
    with without_warnings():
        prediction = predict(model, **inputs)
    weights = weights_of(model)
    reading = recognise(weights, model)
    seen = Evidence(prediction, None, {}, meant or model)
    findings, said = rules(seen)
    findings += () if meant is None else _wrong_variances(weights, meant)
    words = reading.title
    if reading.unexplained:
        left = ", ".join(reading.roles_left())
        words = f"{words}, but for {left}" if reading.share >= 0.5 else "of no published scheme"
    if reading.intended is not None:
        findings = [*_wrong_variances(weights, reading.intended, reading.title), *findings]
    return Report(
        source=name,
        scheme=words,
        findings=tuple(findings),
        notes=(*notes, *said, *prediction.warnings),
        unchecked=("the module itself (no weights were read, nothing was run)",),
        rows=tuple(stream_numbers(prediction, None)),
        model=model,
        prediction=prediction,
    )


def _wrong_variances(
    weights: Sequence[Weight], meant: Transformer, slip: str = ""
) -> Iterator[Finding]:
    """Findings for matrices of wrong variance, by name; a single one if a `slip` explains them."""
    groups: dict[str, list[tuple[Weight, float]]] = {}
    for w in weights:
        wanted = float(getattr(meant.layer_weights(w.layer), w.name))
        if not w.is_of(wanted):
            groups.setdefault(slip or w.name, []).append((w, wanted))
    for group in groups.values():
        weight, wanted = group[0]
        names = tuple(dict.fromkeys(w.name for w, _ in group))
        at = names, tuple(sorted({w.layer for w, _ in group})), weight.variance, wanted
        why, mend = slip, f"draw them as {in_words(meant)}"
        if not slip:
            why = f"{weight.name} has std {weight.variance**0.5:.3g}, "
            why += f"{times(weight.variance, wanted):.3g} times the scheme's variance"
            mend = f"draw it with std {wanted**0.5:.3g}"
        yield Finding("warning", "wrong variance", *at, why, mend)
