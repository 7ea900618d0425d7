"""Whether a network is in order at initialisation: rules on its numbers, and declarations checked.

Every rule is about a consequence, so that its bound has a reason that no data were asked for. What
a rule reads is measured where a module was run, else predicted.
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
from ..model.transformer import Transformer
from ..noise.band import NORMAL_95
from ..prediction.predict import predict
from ..prediction.resolution import shortened
from .expected import TOLERANCE, point_log_variance
from .findings import Finding, Report, Row, streamed
from .precision import FORMATS, precision
from .recognition import Weight, in_words, recognise, weights_of
from .verdict import NAMES, choices, times

if TYPE_CHECKING:
    import pandas as pd

    from ..prediction.result import Prediction
    from .comparison import Comparison

BY_CHANCE = 1e-3
"""Probability that the chance of one draw decides any rule on a right network: such numbers are
judged by what is expected of these weights unless the draw is further from it than so many of them
ever are together (Bonferroni)."""

LOSS = 2.0
"""Nats by which a first loss may exceed log(vocabulary). Logits of variance v add v/2: published
models of width 8192 drawn with deviation 0.02 have 1.6; what is beyond is spent on shrinking logits
before anything is learned."""

COLLAPSED = 0.99
"""Token correlation above which tokens count as alike: what distinguishes two of them is then less
than a seventh of their size, |x_i - x_j|^2 = 2 (1 - r) v."""

IDENTITY = 1e-4
"""Variance that a layer adds, over its input's, below which it acts as the identity: it changes its
input by 1 % of its size, a hundred such layers in independent directions by a tenth."""

GRADIENT = 1e6
"""Factor between first and last layer of (gradient variance) x (signal variance), either way. That
product does not change with the units of the stream, which a norm divides out; a thousand in size
is what one learning rate, or one clipping norm, cannot serve at both ends."""

POSITIONS = 0.95
"""Share of positions in the variance that enters layer 1, above which tokens differ by a
twentieth of it."""

PEAKED = 0.5
"""E sum_j (a_ij - 1/n)^2 of attention weights above which a row reads about one key: half of what
a single one has."""

EPSILON = 0.1
"""Share of a norm's epsilon in the variance it divides by, from which it shrinks what it normalises
by 5 %."""

LARGEST_EPSILON = 1e-3
"""Of the norms of released models and of frameworks: Keras's default. Others have 1e-12 to 1e-5."""

LARGE = 100.0
"""Variance of tokens over that of the matrices from which a stream that layers hardly change is the
token table's doing: ten times the matrices' std."""

STARVED = 0.5
"""Part of the experts that get less than a tenth of an even share, from which it is named."""

COPIES = 0.9999
"""The same everywhere, from which streams are called copies."""

ALIKE = 0.99
"""Correlation of two residual streams of a token behind the last layer, from which it is named."""

OVERFLOW = 1e-9
"""Share of entries beyond a format's range that is named: one in as many as a large model's step
has."""


# --- numbers --------------------------------------------------------------------------------------


def stream_numbers(prediction: Prediction, comparison: Comparison | None) -> Iterator[Row]:
    """Both ends of the stream, the loss and the logits."""
    model = prediction.model
    ends = (("entering layer 1", 0), (f"leaving layer {model.layers}", model.layers))
    points: dict[tuple[str, int], Any] = {}
    if comparison is not None:
        frame = comparison.points()
        rows = frame[frame["stack"] == ""].to_dict("records")
        points = {(str(row["quantity"]), int(row["layer"])): row for row in rows}
    for name in ("variance", "grad_variance"):
        for where, n in ends:
            words = f"{name.replace('grad_', 'gradient ')} {where}"
            if points:
                row = points[name, n]
                seen, expected = float(row["measured"]), float(row["predicted"])
                band = float(row["low"]), float(row["high"])
                yield streamed(words, seen, expected, band, bool(row["inside"]))
            else:
                expected, (low, high) = float(getattr(prediction, name)[n]), (math.nan, math.nan)
                if name == "grad_variance" and prediction.states_draws:
                    low, high = map(float, prediction.grad_variance_band[:, n])
                yield streamed(words, math.nan, expected, (low, high))
    measured: Any = None if comparison is None else comparison.measurement
    for where, n in ends:
        seen = math.nan if measured is None else float(measured.correlation[n])
        yield streamed(f"token correlation {where}", seen, float(prediction.correlation[n]))
    yield from _outputs(prediction, measured)


def _outputs(prediction: Prediction, measured: Any) -> Iterator[Row]:
    vocab = choices(prediction.model)
    loss = None if measured is None else measured.loss
    seen = math.nan if loss is None else float(loss)
    if prediction.loss is not None:
        expected, error = float(prediction.loss), NORMAL_95 * float(prediction.loss_stderr or 0.0)
        yield streamed("loss", seen, expected, (expected - error, expected + error))
    if vocab is not None:
        yield streamed(f"loss against log({vocab})", seen, math.log(vocab))
    if prediction.logit_variance is not None:
        logits = None if measured is None else measured.logit_variance
        seen = math.nan if logits is None else float(logits)
        yield streamed("mean squared logit", seen, float(prediction.logit_variance))


def first_off(points: pd.DataFrame, given: str) -> tuple[int, float, float, str]:
    """Of `Comparison.outliers` the first, forward where any is: the layer that it leaves, measured
    and predicted, and how far it is from what is `given`, in words."""
    first = points[points["quantity"] == "variance"]
    row: Any = (first.iloc[0] if len(first) else points.iloc[-1]).to_dict()
    layer, measured, predicted = int(row["layer"]), float(row["measured"]), float(row["predicted"])
    where = f"leaving layer {layer}" if layer else "entering layer 1"
    words = f"the {NAMES[row['quantity']]} {where} is {measured / predicted:.3g} times what the "
    words += f"{given} ({row['deviations']:+.1f} standard deviations)"
    return layer, measured, predicted, words


# --- rules ----------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What the rules read: the prediction for the network's own weights, its comparison with a
    measurement if any, the user's names of tensors by role, the network as it is meant to be if
    known, and the parameters' dtype."""

    prediction: Prediction
    comparison: Comparison | None
    names: Mapping[str, tuple[str, ...]]
    intended: Transformer | None = None
    dtype: str = "float32"

    @property
    def source(self) -> Any:
        """Measurement, or prediction."""
        return self.prediction if self.comparison is None else self.comparison.measurement

    def of(self, *roles: str) -> tuple[str, ...]:
        """Names of tensors."""
        return tuple(name for role in roles for name in self.names.get(role, ()))


def rules(seen: Seen) -> tuple[list[Finding], list[str]]:
    """Findings and notes from the numbers along the depth and at the output."""
    every = (
        *(_loss, _collapse, _identity, _gradient, _tables, _final_norm, _attention, _range),
        *(_experts, _mixers, _streams, _depth_scale),
    )
    result = [one for rule in every for one in rule(seen)]
    findings = [one for one in result if isinstance(one, Finding)]
    return findings, [one for one in result if isinstance(one, str)]


Found = Iterator[Finding | str]


def _loss(seen: Seen) -> Found:
    model, source = seen.prediction.model, seen.source
    vocab = choices(model)
    if source.loss is None or vocab is None or model.head is None:
        return
    loss, uniform = float(source.loss), math.log(vocab)
    judged = loss
    if seen.prediction.loss is not None:
        scatter = float(seen.prediction.loss_stderr or 0.0)
        judged = float(settled(seen, loss, float(seen.prediction.loss), scatter))
    if judged - uniform <= LOSS:
        return
    logits = source.logit_variance
    of = "token" if model.head.tied else "head"
    names = seen.of(of) or seen.of("token") or (of,)
    width = model.d_model * (model.head.output_scale or 1.0) ** 2
    more = "" if logits is None else f"; logits have a mean square of {float(logits):.3g}, not 1"
    more += ", and the head is the token table itself" if model.head.tied else ""
    yield Finding(
        "error" if judged > 2 * uniform else "warning",
        "initial loss",
        names,
        (),
        loss,
        uniform,
        f"the first loss is {loss:.3g}, {loss / uniform:.3g} times that of guessing, "
        f"log({vocab}) = {uniform:.3g}{more}",
        f"draw {of} with a std of at most 1/sqrt(d_model) = {width**-0.5:.2g}, or multiply the "
        "logits down to a mean square of 1",
    )


def settled(seen: Seen, measured: Any, expected: Any, deviation: Any) -> np.ndarray:
    """What a rule judges: expected numbers where one draw does not contradict them, else its own;
    `deviation` is that of one draw from the expected number, nan where it is not known."""
    from scipy.special import ndtri

    numbers = 1 + seen.prediction.model.layers  # the loss, and what every layer adds
    far = -float(ndtri(BY_CHANCE / (2 * numbers))) * np.asarray(deviation)
    near = np.abs(np.subtract(measured, expected)) <= far
    return np.asarray(np.where(near, expected, measured))


def _collapse(seen: Seen) -> Found:
    correlation = np.asarray(seen.source.correlation)
    alike = np.flatnonzero(correlation > COLLAPSED)
    if alike.size == 0 or seen.prediction.model.seq_len < 2:
        return
    first = int(alike[0])
    layers = tuple(int(n) for n in alike if n)
    where = f"after layer {first}" if first else "before layer 1"
    worst = float(correlation[alike[0]])
    yield Finding(
        "warning",
        "tokens alike",
        seen.of("output", "ffn_out")[:2] if first else seen.of("token", "position"),
        layers,
        worst,
        float(seen.prediction.correlation[first]),
        f"{where} tokens are indistinguishable: their correlation is {worst:.4f}, above "
        f"{COLLAPSED:g}, and {float(correlation[-1]):.4f} at the last layer",
        "weigh attention's branch less against the skip connection (a depth scale on its output), "
        "or place the norm before the block"
        if first
        else "give token embeddings a larger share of what enters layer 1",
    )


_OUTPUTS = ("post_norm", "dropout", "projection", "out")
"""Sites behind which a block's output enters its sum, the last one first."""


def added(seen: Seen) -> np.ndarray:
    """Variance that every layer's blocks add, over that of the layer's input, (N,); nan where the
    sites are not known."""
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
    return settled(seen, measured, expected, deviation * expected)


BY_DESIGN = "blocks are the identity at step 0, by design: their outward matrices are zero"


def _identity(seen: Seen) -> Found:
    ratio = added(seen)
    if _swallowed(seen):
        return  # named as what it is
    idle = tuple(int(n) + 1 for n in np.flatnonzero(ratio < IDENTITY))
    if not idle:
        return
    intended = seen.intended
    meant = intended is not None and float(np.max(intended.by_block("branch_scale"))) < 0.1
    zero = bool(np.all(ratio[[n - 1 for n in idle]] == 0))
    words = (
        f"{'every layer' if len(idle) == len(ratio) else f'layers {listed(idle)}'} act"
        f"{'s' * (len(idle) == len(ratio))} as the identity: what is added has "
        f"{float(np.min(ratio)):.2g} of the variance of the layer's input"
    )
    if zero:
        if len(idle) == len(ratio):
            yield BY_DESIGN
        return
    if meant:
        yield f"{words}, as its scheme means it"
        return
    embedding, weights = seen.prediction.model.embedding, seen.prediction.model.weights
    tokens = getattr(embedding, "token_variance", None)
    inner = float(np.median(np.asarray(weights.query))) if weights is not None else 0.0
    if embedding is not None and tokens is not None and inner:
        entering = float(embedding.scale) ** 2 * float(tokens)
        if entering > LARGE * inner and float(np.min(ratio)) * entering / inner > IDENTITY:
            scale, root = float(embedding.scale), math.sqrt(inner)
            mend = f"draw the token table with the matrices' std, {root:.3g}: nn.Embedding draws "
            mend += "itself with std 1"
            if tokens <= LARGE * inner:  # its table is drawn as they are
                mend = f"lower the factor {scale:.3g} on the embedding, or what divides the blocks"
            yield Finding(
                "warning",
                "embedding scale",
                seen.of("token") or ("token",),
                idle,
                math.sqrt(entering),
                math.sqrt(inner),
                f"{words}: tokens enter with a std of {math.sqrt(entering):.3g}, "
                f"{math.sqrt(entering / inner):.3g} times that of the matrices",
                mend,
            )
            return
    yield Finding(
        "warning",
        "identity layers",
        seen.of("output", "ffn_out"),
        idle,
        float(np.min(ratio)),
        IDENTITY,
        f"{words}, below {IDENTITY:g}: with matrices this small at d_model "
        f"{seen.prediction.model.d_model}, or a stream that is large from its embedding on, the "
        "network is little more than its embedding",
        "draw matrices by their width (Xavier, 1/fan_in) instead of one std for all widths, or "
        "draw the embedding tables smaller",
    )


def _gradient(seen: Seen) -> Found:
    source = seen.source
    first, last = (float(source.variance[n]) * float(source.grad_variance[n]) for n in (0, -1))
    p = seen.prediction
    wanted = times(p.variance[0] * p.grad_variance[0], p.variance[-1] * p.grad_variance[-1])
    ratio = times(first, last)
    if not last or 1 / GRADIENT <= ratio <= GRADIENT:
        return
    way = "vanishes" if ratio < 1 else "explodes"
    names: tuple[str, ...] = ()
    why = f"the gradient {way} towards the input: times the stream's variance it is {ratio:.2g} "
    why += f"times at the first layer what it is at the last, beyond a factor of {GRADIENT:g}"
    mend = "a scheme for depth (moments.solve), Pre-LN, or a branch scale of 1/sqrt(2N)"
    if p.model.placements[0] == "pre" and source.token_variance is not None:
        entering, back = source.token_variance[0], source.token_grad_variance[0]
        there = entering > p.model.norm_epsilon
        rest = float(np.mean(entering[there]) * np.mean(back[there])) if there.any() else 0.0
        if not there.all() and 1 / GRADIENT <= times(rest, last) <= GRADIENT:
            names = seen.of("class", "position")
            count = int(np.sum(~there))
            which = (
                f"{count} tokens alone, which enter"
                if count > 1
                else "one token alone, which enters"
            )
            why += f". It does at {which} as 0: a norm divides them by its epsilon alone"
            mend = "draw the class token, or its position, as patches are: std 0.02, not zeros"
    yield Finding("warning", f"gradient {way}", names, (1,), ratio, wanted, why, mend)


def _tables(seen: Seen) -> Found:
    embedding = seen.prediction.model.embedding
    tokens = getattr(embedding, "token_variance", None)
    if embedding is None or tokens is None:
        return
    total = float(embedding.variance)
    token = float(embedding.scale) ** 2 * float(tokens)
    positions = total - token - float(embedding.segment_variance)
    if total and positions / total > POSITIONS:
        sines = embedding.positions == "sinusoidal"
        mend = (
            "multiply token embeddings by sqrt(d_model), or draw them with variance 1"
            if sines
            else "draw positions with the std of the tokens"
        )
        yield Finding(
            "warning",
            "positions drown tokens",
            seen.of("position") or ("positions",),
            (),
            positions / total,
            POSITIONS,
            f"positions are {100 * positions / total:.1f} % of the variance that enters layer 1 "
            f"({positions:.3g} against {token:.3g} of the tokens)",
            mend,
        )
    epsilon, first = seen.prediction.model.norm_epsilon, float(seen.source.variance[0])
    pre = seen.prediction.model.placements[0] == "pre"
    if _swallowed(seen):
        yield Finding(
            "warning",
            "norm epsilon",
            seen.of("attention.norm.gain", "ffn.norm.gain"),
            (),
            epsilon,
            LARGEST_EPSILON,
            f"the norms' epsilon {epsilon:g} is {100 * epsilon / (epsilon + first):.0f} % of what "
            f"the first one divides by: a stream of variance {first:.2g} is not normalised",
            "pass eps=1e-5",
        )
    elif pre and first and epsilon / (epsilon + first) > EPSILON:
        yield (
            f"the norms' epsilon {epsilon:g} is {100 * epsilon / (epsilon + first):.0f} % of what "
            f"the first one divides by: the stream enters with a variance of {first:.2g}"
        )


def _swallowed(seen: Seen) -> bool:
    """Whether the norms' epsilon is more than half of what the first one divides by, and none that
    is in use."""
    model, first = seen.prediction.model, float(seen.source.variance[0])
    return model.placements[0] == "pre" and model.norm_epsilon > max(first, LARGEST_EPSILON)


def _final_norm(seen: Seen) -> Found:
    model = seen.prediction.model
    if model.head is None or model.head.norm or model.head.loss is None:
        return
    if set(model.placements) != {"pre"}:
        return
    if seen.intended is not None and seen.intended.head is not None and not seen.intended.head.norm:
        yield "no norm stands between the last Pre-LN layer and the head, as it is meant"
        return
    growth = times(float(seen.source.variance[-1]), float(seen.source.variance[0]))
    yield Finding(
        "warning",
        "no final norm",
        seen.of("final.norm.gain", "head") or seen.of("token") or ("head",),
        (model.layers,),
        growth,
        math.nan,
        "the head reads a Pre-LN stream that nothing normalises: its variance, and that of the "
        f"logits, grows with depth ({growth:.3g} times here)",
        "put a norm behind the last layer, and run it",
    )


def _attention(seen: Seen) -> Found:
    frame = seen.prediction.attention()
    peaked = frame[frame["distance_to_uniform"] > PEAKED]
    if len(peaked):
        layers = tuple(int(n) for n in peaked["layer"])
        worst = float(peaked["logit_variance"].max())
        yield Finding(
            "warning",
            "attention saturated",
            seen.of("query", "key"),
            layers,
            worst,
            1.0,
            f"attention starts at a single key: logits within a row have a variance of "
            f"{worst:.3g}, so that the softmax passes no gradient to queries and keys",
            "divide q k by sqrt(d_head), draw query and key smaller, or normalise them",
        )


def _range(seen: Seen) -> Found:
    """Of the format that the parameters have, and of bf16, which has the range of float32."""
    frame = precision(seen.prediction)
    for form in FORMATS:
        used = seen.dtype == form.name
        rows = frame[frame["format"] == form.title]
        over = rows[rows["overflow"] > OVERFLOW]
        if len(over) and (used or form.name == "bfloat16"):
            worst: Any = over.sort_values("overflow").iloc[-1]
            words = (
                f"{form.title} overflows at {worst['site']} of layer {int(worst['layer'])} "
                f"({worst['way']}): a variance of {worst['variance']:.3g} leaves "
                f"{worst['overflow']:.2g} of the entries beyond {form.largest:g}"
            )
            mend = "keep the stream's variance in range with a norm or a residual scale"
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


def _experts(seen: Seen) -> Found:
    """Of what is declared: load is a matter of the router's draw and the tokens' correlation."""
    prediction = seen.prediction
    if not any(isinstance(block, Experts) for block in prediction.model.ffns):
        return
    frame = prediction.experts()
    still = frame[~frame["learns"]]
    if len(still):
        yield Finding(
            "error",
            "router cannot learn",
            seen.of("router") or ("router",),
            tuple(map(int, still["layer"])),
            0.0,
            math.nan,
            "the gate of a single chosen expert over itself is 1 whatever the logits are: no "
            "gradient reaches the router, but that of a balancing loss",
            "leave the gate as softmax or sigmoid gives it (normalised='all' or 'none'), or choose "
            "two experts",
        )
    # by chance, however evenly so few tokens choose
    missed = (1 - frame["chosen"] / frame["experts"]) ** min(prediction.model.seq_len, TOKENS)
    starved = frame[frame["starving"] > missed + STARVED * (1 - missed)]
    if len(starved):
        worst = starved.sort_values("starving").iloc[-1]
        yield Finding(
            "warning",
            "experts starve",
            seen.of("router") or ("router",),
            tuple(map(int, starved["layer"])),
            float(worst["starving"]),
            STARVED,
            f"in one draw {100 * worst['starving']:.0f} % of {int(worst['experts'])} experts get "
            f"less than a tenth of an even share of the tokens in layer {int(worst['layer'])}, "
            f"where two tokens' logits correlate by {worst['logit_correlation']:.2f}, and one "
            f"expert {worst['largest_load']:.3g} times an even share",
            "train with a balancing loss from the first step, or keep tokens apart: a smaller "
            "attention branch, or token embeddings of a larger share",
        )


def _streams(seen: Seen) -> Found:
    """Of what is declared: whether several residual streams differ at all."""
    if seen.prediction.model.streams is None:
        return
    frame = seen.prediction.streams()
    last = float(frame["likeness"].iloc[-1])
    if last < ALIKE:
        return
    first, count = float(frame["likeness"].iloc[0]), seen.prediction.model.streams.streams
    copies = float(frame["likeness"].min()) > COPIES
    yield Finding(
        "note" if copies else "warning",
        "streams stay copies" if copies else "streams become alike",
        seen.of("streams"),
        tuple(sorted(set(map(int, frame["layer"])))),
        last,
        ALIKE,
        f"all {count} residual streams carry the same tensor at the start (they correlate by "
        f"{last:.6f}): coefficients of reading and mixing receive no gradient before streams differ"
        if copies
        else f"two residual streams of a token correlate by {first:.3f} behind the first block and "
        f"by {last:.3f} behind the last: mixing leaves of their differences "
        f"{float(frame['mixing'].iloc[-1]):.2f} of the variance at every block",
        "nothing, if this start is meant: it is that of one stream"
        if copies
        else "start mixing nearer to the identity (mixing='identity', or a bias on its diagonal)",
    )


def _mixers(seen: Seen) -> Found:
    """Of what is declared: how fast recurrent heads forget, and whether a norm's epsilon is most of
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
        worst = min(dead.values(), key=lambda one: one.share)
        yield Finding(
            "warning",
            "dead branch",
            seen.of("mixer_norm.gain"),
            tuple(dead),
            worst.size,
            worst.epsilon,
            worst.swallows,
            "draw the matrices before the norm larger (by their width), or pass a smaller epsilon",
        )
    gone = {layer: one for layer, one in at.items() if one.forgotten > 0.5}
    if gone:
        worst = max(gone.values(), key=lambda one: one.forgotten)
        yield Finding(
            "warning",
            "forgets at once",
            seen.of("mixer_step.bias", "rate"),
            tuple(gone),
            worst.forgotten,
            0.5,
            worst.forgets,
            "draw the steps' biases for steps of 1e-3 to 1e-1 (dt_bias), or smaller rates (A_log)",
        )


def _depth_scale(seen: Seen) -> Found:
    """Of what is declared: a scale for two sums a layer where there are others."""
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
        yield (
            f"what is added is scaled by 1/(2 N) = 1/{2 * model.layers}, as for two sums a layer, "
            f"and there are {sums}: the stream grows by half of what that is meant for; 1/N is the "
            "same scale here"
            if sums == model.layers
            else f"what is added is scaled by 1/(2 N) = 1/{2 * model.layers}, as for two sums a "
            f"layer, and there are {sums}: 1/{sums} is the same scale here"
        )


# --- declarations ---------------------------------------------------------------------------------


def is_factory(subject: Any) -> bool:
    """Whether it is a class, or a function, that makes what is to be checked."""
    made = hasattr(subject, "forward") or _config(subject) or not callable(subject)
    return isinstance(subject, type) or not made


def made_by(subject: Any) -> tuple[Any, Any]:
    """What a factory makes, and its batch where it gives one; anything else as it is."""
    if is_factory(subject):
        seeded = not isinstance(subject, type) and _takes_one(subject)
        subject = subject(0) if seeded else subject()
    pair = isinstance(subject, tuple) and len(subject) == 2 and hasattr(subject[0], "forward")
    return subject if pair else (subject, None)


def _takes_one(function: Any) -> bool:
    """Whether a function has to be given one argument: a seed."""
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
    """The declaration that something is, and its name; None where it may be a module."""
    if isinstance(subject, Transformer):
        return subject, "Transformer"
    if isinstance(subject, str) and subject in preset.names():
        return shortened(preset(subject)), subject
    if _config(subject):
        config = subject if isinstance(subject, Mapping) else subject.to_dict()
        return shortened(from_huggingface(subject)), f"config of type {config.get('model_type')!r}"
    if isinstance(subject, str | os.PathLike):
        path = Path(subject)
        alone = path.is_dir() and not any(path.glob("*.safetensors"))
        if path.suffix == ".json" or (alone and (path / "config.json").is_file()):
            return shortened(from_huggingface(subject)), str(subject)
    model = getattr(subject, "model", None)
    if isinstance(model, Transformer):
        return model, type(subject).__name__
    return None


def check_declared(
    model: Transformer, name: str, *, batch: Any = None, scheme: Any = None, loss: Any = None
) -> Report:
    """A declaration by its predictions; DomainError for a batch or a loss, which need a module."""
    for argument, value in (("batch", batch), ("loss", loss)):
        if value is not None:
            raise domain_error(argument, type(value).__name__, "None without a module to run")
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
        notes.append("what enters layer 1 depends on its pictures: variance 1, no correlation")
    with without_warnings():
        prediction = predict(model, **inputs)
    weights = weights_of(model)
    reading = recognise(weights, model)
    seen = Seen(prediction, None, {}, meant or model)
    findings, said = rules(seen)
    findings += () if meant is None else _wrong(weights, meant)
    words = reading.title
    if reading.left:
        left = ", ".join(reading.roles_left())
        words = f"{words}, but for {left}" if reading.share >= 0.5 else "of no published scheme"
    if reading.meant is not None:
        findings = [*_wrong(weights, reading.meant, reading.title), *findings]
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


def _wrong(weights: Sequence[Weight], meant: Transformer, slip: str = "") -> Iterator[Finding]:
    """Matrices that are not of their variance, by name; together where one `slip` explains them."""
    groups: dict[str, list[tuple[Weight, float]]] = {}
    for w in weights:
        wanted = float(getattr(meant.layer_weights(w.layer), w.name))
        if not w.is_of(wanted):
            groups.setdefault(slip or w.name, []).append((w, wanted))
    for group in groups.values():
        weight, wanted = group[0]
        more = f"{times(weight.variance, wanted):.3g} times the scheme's variance"
        yield Finding(
            "warning",
            "wrong variance",
            tuple(dict.fromkeys(w.name for w, _ in group)),
            tuple(sorted({w.layer for w, _ in group})),
            weight.variance,
            wanted,
            slip or f"{weight.name} has {more}",
            f"draw them as {in_words(meant)}" if slip else f"draw it with std {wanted**0.5:.3g}",
        )
