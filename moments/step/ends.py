"""A step at both ends of the network: the tables that are read, and the matrix to the logits.

Rows of a table gather the gradients of the tokens that look them up. A row's step under the sign
rule is the sign of a Gaussian vector, so that two rows' steps have the covariance (2/pi) asin of
the rows' correlation and the coherent part sqrt(2/pi)/deviation times the gradient. A tied table is
also the matrix to the logits, and its rows gather what that sends.

With c_tv = (p_tv - 1[v is t's target])/targets the gradient of the mean loss in the logits, at its
mean over draws, the matrix's row v receives sum_t c_tv h_t, and h_t receives sum_v c_tv E_v.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DomainError
from .change import Array, Change
from .rules import SIGN_MEAN, Effect, Optimizer, damping
from .sites import ENCODER, Reading, Stream


@dataclass(frozen=True, eq=False)
class Words:
    """The logits that the batch tells apart, and the rest as one of them.

    Attributes:
        rows: (V',) how many rows of the matrix each stands for.
        target: (T,) which of them is a token's target, -1 for none.
        read: (T,) which of them a token reads; -1 where the matrix is no token table.
        sent: (T, V') c.
        beside: of an encoder's tokens which they read; None: there is none.
    """

    rows: Array
    target: Any
    read: Any
    sent: Array
    beside: Any = None

    @classmethod
    def of(cls, reading: Reading) -> Words:
        readout = reading.readout
        vocab_size, active = readout.vocab_size, reading.targets >= 0
        ids = reading.main.token_ids if reading.tied else np.full(len(active), -1)
        other = ids[:0] if reading.encoder is None else reading.encoder.token_ids
        named = np.unique(np.concatenate([reading.targets[active], ids[ids >= 0], other]))
        rest = vocab_size - len(named)
        rows = np.append(np.ones(len(named)), float(rest)) if rest else np.ones(len(named))
        place = {int(word): k for k, word in enumerate(named)}
        target = np.array([place.get(int(word), -1) for word in reading.targets])
        read = np.array([place.get(int(word), -1) for word in ids])
        count, every = float(active.sum()), np.arange(len(active))
        softmax, zeros = readout.softmax, np.zeros(len(active))
        other = np.asarray(softmax.other.probability) + zeros
        sent = np.repeat(other[:, None], len(rows), 1)
        if np.any(readout.carried):
            sent[every, read] = np.asarray(softmax.own.probability) + zeros
        sent = sent * active[:, None] / count
        sent[every[active], target[active]] -= 1 / count
        beside = None
        if reading.encoder is not None:
            beside = np.array([place[int(word)] for word in other])
        return cls(rows, target, read, sent, beside)

    @functools.cached_property
    def reads(self) -> Array:
        """(T, V') 1 where a token reads a row of the matrix."""
        return self.of_stream(main=True)

    def of_stream(self, main: bool) -> Array:
        """`reads`, of the main stream's tokens or of its encoder's."""
        read = self.read if main else self.beside
        return np.asarray(read[:, None] == np.arange(len(self.rows)), float)


def tied_overlap(reading: Reading, words: Words) -> Array:
    """(T, T) E x_t delta_s along the identity path of a tied head, at every point of the stream.

    x_t holds the vector of the word that t reads, and delta_s those of the words that s's loss
    moves: k_s scale variance c_{s, word of t}, k how much of a token's own row the matrix reads,
    less what the last norm's projection takes. Constant along the stream, as what skip connections
    multiply in x they divide out of delta.
    """
    readout = reading.readout
    count = len(reading.last.kernel)
    if not np.any(readout.carried):
        return np.zeros((count, count))
    k = np.asarray(readout.carried) + np.zeros(count)
    met = readout.scale * readout.weight_variance * k[None, :] * words.sent[:, words.read].T
    if readout.normalised:
        kernel = reading.last.kernel
        met = met - np.diag(met)[None, :] * kernel / np.diag(kernel)[None, :]
    return np.asarray(met)


@dataclass(frozen=True, eq=False)
class Entered:
    """What a step does to the sum of the tables.

    Attributes:
        change: of that sum.
        effects: of every table: its step at learning rate 1.
    """

    change: Change
    effects: tuple[tuple[str, Effect], ...]


def row_variance(reading: Reading, words: Words, tied: Array) -> Array:
    """(V',) variance of an entry of each row's gradient, of the matrix to the logits.

    `tied`: `tied_overlap`.
    """
    readout = reading.readout
    kernel = np.asarray(readout.kernel.pairs)
    found = readout.scale**2 * ((kernel @ words.sent) * words.sent).sum(0)
    table = reading.main.token_table
    if table is None or not reading.tied:
        return np.asarray(np.maximum(found, 0.0))
    for stream in reading.streams:
        reads = words.of_stream(stream is reading.main)
        gathered = ((stream.received @ reads) * reads).sum(0)
        found = found + table.amplitude**2 * gathered
    if np.any(readout.carried):
        k = np.asarray(readout.carried) + np.zeros(len(kernel))
        at_head = tied * (k / table.amplitude)[:, None]
        met = ((at_head @ words.reads) * words.sent).sum(0)
        found = found + 2 * readout.scale * table.amplitude * met
    return np.asarray(np.maximum(found, 0.0))


def entered(
    reading: Reading,
    words: Words,
    optimizer: Optimizer,
    rate: float,
    stream: Stream,
    tied: Array,
) -> Entered:
    """The step of the tables, at their sum. A table of both streams is the main one's.

    `tied`: `tied_overlap`.
    """
    gradient, main = stream.received, stream is reading.main
    count, d = len(gradient), float(reading.model.d_model)
    nothing = np.zeros((count, count))
    coherent, overlap, total = nothing.copy(), nothing.copy(), nothing.copy()
    effects: list[tuple[str, Effect]] = []
    tables, rule = stream.tables, optimizer.others
    before = "" if main else ENCODER
    named = [table.name if table.name == "token" else before + table.name for table in tables]
    rates = [rate * optimizer.factor(name) for name in named]
    grams: dict[tuple[int, int], Array] = {}
    for i, one in enumerate(tables):
        for j, other in enumerate(tables[: i + 1]):
            scale = one.amplitude * other.amplitude
            grams[i, j] = scale * one.same @ gradient @ other.same
            grams[j, i] = grams[i, j].T
    headed = reading.tied and stream.token_table is not None
    if headed:
        # rows also gather what the head sends and what another stream's tokens receive, at words
        rows = row_variance(reading, words, tied if main else 0 * reading.main.before)
        readout = reading.readout
        sent = readout.scale * words.sent
        gathered = sent.T @ np.asarray(readout.kernel.pairs) @ sent
        for beside in reading.streams:
            if beside is not stream:
                there = words.of_stream(beside is reading.main)
                gathered = gathered + tables[0].amplitude ** 2 * (there.T @ beside.received @ there)
        reads = words.of_stream(main)
        grams[0, 0] = grams[0, 0] + reads @ gathered @ reads.T
        np.fill_diagonal(grams[0, 0], reads @ rows)
    deviations = [np.sqrt(np.maximum(np.diag(grams[i, i]), 0.0)) for i in range(len(tables))]
    for i, table in enumerate(tables):
        size = np.diag(grams[i, i])
        if headed and i == 0:
            whole = float((words.rows * rows).sum()), float((words.rows * np.sqrt(rows)).sum())
        else:
            whole = table.once(size), table.once(deviations[i])
        if rule == "sgd":
            pulled = np.ones(count)
            slope, square = d * whole[0], whole[0] / table.count
            damped, noise = 1.0, 1.0
        else:
            damped, noise = damping(float(np.mean(size)) ** 0.5, optimizer.epsilon)
            inverse = np.divide(
                1.0,
                deviations[i],
                out=np.zeros(count),
                where=deviations[i] > 1e-12 * deviations[i].max(),
            )
            pulled = SIGN_MEAN * damped * inverse
            slope = d * SIGN_MEAN * damped * whole[1]
            square = noise * (
                1.0 if headed and i == 0 else table.once(np.ones(count)) / table.count
            )
        amplitude = table.amplitude
        coherent += rates[i] * amplitude**2 * pulled[:, None] * table.same
        if main or not (headed and i == 0):
            effects.append((table.name, Effect(nothing, nothing, slope, square, np.nan)))
        for j, other in enumerate(tables):
            covariance: Array = grams[i, j]
            if rule != "sgd":
                both = np.outer(deviations[i], deviations[j])
                r = np.divide(covariance, both, out=np.zeros_like(both), where=both > 0)
                covariance = noise * 2 / np.pi * np.arcsin(np.clip(r, -1.0, 1.0))
            total += rates[i] * rates[j] * amplitude * other.amplitude * covariance
        if main and headed and i == 0 and np.any(reading.readout.carried):
            # the row also moves along what the head reads, x_r of the tokens that it predicts
            k = np.asarray(reading.readout.carried) + np.zeros(count)
            read = (k / amplitude)[:, None] * stream.before
            sent_to = reading.readout.scale * words.sent[:, words.read].T
            overlap -= rates[i] * amplitude * pulled[:, None] * (sent_to @ read)
    if stream.patch is not None:
        change, found, name = _patches(stream.patch, d, optimizer, rate, gradient)
        coherent, total = coherent + change.coherent, total + change.total
        effects.append((name, found))
    overlap -= coherent @ tied.T
    return Entered(Change(coherent, overlap, total), tuple(effects))


def _patches(
    pixels: Array, d: float, optimizer: Optimizer, rate: float, gradient: Array
) -> tuple[Change, Effect, str]:
    """The projection of patches, whose input is what the images are: a row's entries are Gaussian
    given the pixels, of variance x_b^T D x_b at pixel b."""
    rule, name = optimizer.others, "patch"
    size = ((gradient @ pixels) * pixels).sum(0)
    total_size, count = float(size.sum()), pixels.shape[1]
    if rule == "sgd":
        coherent = pixels @ pixels.T
        total = coherent @ gradient @ coherent
        found = Effect(coherent, total, d * total_size, total_size / count, np.nan)
    else:
        there = size > 1e-18 * size.max(initial=0.0)
        root = np.where(there, np.sqrt(np.where(there, size, 1.0)), 1.0)
        scaled = np.where(there, pixels / root, 0.0)
        coherent = SIGN_MEAN * scaled @ pixels.T
        corr = np.clip(scaled.T @ gradient @ scaled, -1.0, 1.0)
        total = pixels @ (2 / np.pi * np.arcsin(corr)) @ pixels.T
        slope = SIGN_MEAN * d * float((root * there).sum())
        found = Effect(coherent, total, slope, float(there.mean()), np.nan)
    step = rate * optimizer.factor(name)
    nothing = np.zeros_like(gradient)
    return Change(step * found.coherent, nothing, step * step * found.total), found, name


@dataclass(frozen=True, eq=False)
class Ending:
    """The logits after a step.

    Attributes:
        loss: expected mean cross-entropy by this module's own reading of the logits' law.
        mean: (T, V') of the logits.
        variance: (T,) of a logit about that.
        change: mean square of the change of a logit, over tokens and rows.
        after: mean square of a logit.
        effects: steps of the head's own parameters at learning rate 1, by name.
    """

    loss: float
    mean: Array
    variance: Array
    change: float
    after: float
    effects: tuple[tuple[str, Effect], ...]


def ending(
    reading: Reading,
    words: Words,
    optimizer: Optimizer,
    rate: float,
    change: Change,
    gradient: Array,
    tied: Array,
    kept: Array,
) -> Ending:
    """The logits and the loss behind a step.

    Args:
        change: of what the matrix reads.
        gradient: E delta delta there.
        kept: (T,) what the last norm leaves of the token's own row, relative to before.
    """
    readout = reading.readout
    if readout.softcap is not None or readout.smoothing:
        what = "logit_softcap" if readout.softcap is not None else "label_smoothing"
        raise DomainError(f"the first step does not cover a head's {what}")
    d, scale, variance = float(readout.width), readout.scale, readout.weight_variance
    kernel = np.asarray(readout.kernel.pairs)
    name = "token" if reading.tied else "head"
    step = rate * optimizer.factor(name)
    decay = 1.0 - rate * optimizer.multiplier(name) * optimizer.weight_decay
    rows = row_variance(reading, words, tied)
    sent = words.sent
    if optimizer.others == "sgd":
        pulled, damped, noise = np.ones(len(rows)), 1.0, 1.0
        slope, square = d * float((words.rows * rows).sum()), _mean(rows, words)
    else:
        damped, noise = damping(_mean(rows, words) ** 0.5, optimizer.epsilon)
        root = np.sqrt(rows)
        pulled = np.divide(SIGN_MEAN * damped, root, out=np.zeros_like(root), where=root > 0)
        slope, square = d * SIGN_MEAN * damped * float((words.rows * root).sum()), noise
    met = change.met(kernel)
    own = -step * scale**2 * d * (met @ sent) * pulled
    table = reading.main.token_table
    if reading.tied and table is not None and np.any(readout.carried):
        # rows that tokens read also follow what those tokens receive
        amplitude = table.amplitude
        k = (np.asarray(readout.carried) + np.zeros(len(kernel))) / amplitude
        received = tied * k[:, None] - (change.coherent @ gradient) * k[None, :]
        own -= step * scale * d * amplitude * (received @ words.reads) * pulled
    through = -(scale**2) * d * variance * decay * (change.coherent @ sent)
    mean = own + through
    effects = []
    if not reading.tied:
        effects.append((name, Effect(kernel, kernel, slope, square, np.nan)))
    if reading.model.head.bias:
        sums = sent.sum(0)
        shift = sums if optimizer.others == "sgd" else np.sign(sums)
        factor = rate * optimizer.factor("head.bias")
        mean = mean - factor * shift
        gained = float((words.rows * np.abs(sums * shift)).sum())
        square = float((words.rows * shift**2).sum() / words.rows.sum())
        effects.append(("head.bias", Effect(kernel, kernel, gained, square, np.nan)))
    size = scale**2 * d * variance * np.diag(change.total)
    total_rows = float(words.rows.sum())
    changed = float(np.mean((mean**2 @ words.rows) / total_rows + size))
    every = np.arange(len(kernel))
    spread = scale**2 * d * variance * decay**2 * np.diag(change.new(kernel))
    if np.any(readout.carried):
        k = (np.asarray(readout.carried) + np.zeros(len(kernel))) * kept
        mean[every, words.read] += scale * d * variance * decay * k
    loss = _loss(mean, spread, words)
    after = float(np.mean((mean**2 @ words.rows) / total_rows + spread))
    return Ending(loss, mean, spread, changed, after, tuple(effects))


def _mean(values: Array, words: Words) -> float:
    return float((words.rows * values).sum() / words.rows.sum())


_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(24)


def _loss(mean: Array, variance: Array, words: Words) -> float:
    """E mean_t [log sum_v exp z_tv - z_t,target] of Gaussian logits of these means.

    The target's logit is averaged over; the others' sum, of many, is at its mean.
    """
    seen = np.flatnonzero(words.target >= 0)
    target, weights = words.target[seen], _WEIGHTS / _WEIGHTS.sum()
    logits = mean[seen] + np.log(words.rows)
    logits = logits + variance[seen, None] / 2
    aim = mean[seen, target]
    logits[np.arange(len(seen)), target] = -np.inf
    # of a word that stands for several rows, the target is one
    others = np.logaddexp.reduce(logits, axis=1)
    at = aim[:, None] + np.sqrt(variance[seen])[:, None] * _NODES
    both = np.logaddexp(others[:, None], at)
    return float(np.mean(both @ weights - aim))
