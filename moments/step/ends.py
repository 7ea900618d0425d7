"""A step at both ends of the network: the embedding tables and the matrix to the logits.

The gradient of a table's row is the sum over the tokens that look it up. Its step under the sign
rule is the sign of a Gaussian vector, so that two rows' steps have the covariance (2/pi) asin of
the rows' correlation and the coherent part sqrt(2/pi)/deviation times the gradient. A tied table is
also the matrix to the logits, whose gradient adds to that of its rows.

With c_tv = (p_tv - 1[v is t's target])/targets the gradient of the mean loss in the logits, at its
mean over draws, the matrix's row v has the gradient sum_t c_tv h_t, and h_t has sum_v c_tv E_v.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import DomainError
from .change import Array, Change
from .rules import SIGN_MEAN, Optimizer, StepSize, damping
from .sites import ENCODER, Reading, Stream, Table


@dataclass(frozen=True, eq=False)
class Words:
    """The words that occur in the batch, and all others as one: V' in total.

    Attributes:
        rows: (V',) number of words that each entry represents.
        target: (T,) entry of a token's target, -1 for none.
        read: (T,) entry of the word that a token looks up; -1 unless the head is tied.
        logit_gradient: (T, V') c.
        own_row: (T,) k, the coefficient of a token's own row in the input of the head.
        encoder_read: as `read`, for an encoder's tokens; None without an encoder.
        evaluated: (T,) tokens whose loss is predicted; None: all with a target.
    """

    rows: Array
    target: Any
    read: Any
    logit_gradient: Array
    own_row: Array
    encoder_read: Any = None
    evaluated: Any = None

    @classmethod
    def of(cls, reading: Reading) -> Words:
        readout = reading.readout
        vocab_size, active = readout.vocab_size, reading.targets >= 0
        ids = reading.main.token_ids if reading.tied else np.full(len(active), -1)
        encoder_ids = ids[:0] if reading.encoder is None else reading.encoder.token_ids
        named = np.unique(np.concatenate([reading.targets[active], ids[ids >= 0], encoder_ids]))
        rest = vocab_size - len(named)
        rows = np.append(np.ones(len(named)), float(rest)) if rest else np.ones(len(named))
        place = {int(word): k for k, word in enumerate(named)}
        target = np.array([place.get(int(word), -1) for word in reading.targets])
        read = np.array([place.get(int(word), -1) for word in ids])
        count, every = float(active.sum()), np.arange(len(active))
        softmax, zeros = readout.softmax, np.zeros(len(active))
        own_row = np.asarray(readout.carried) + zeros
        other = np.asarray(softmax.other.probability) + zeros
        gradient = np.repeat(other[:, None], len(rows), 1)
        if own_row.any():
            gradient[every, read] = np.asarray(softmax.own.probability) + zeros
        gradient = gradient * active[:, None] / count
        gradient[every[active], target[active]] -= 1 / count
        encoder_read = evaluated = None
        if reading.encoder is not None:
            encoder_read = np.array([place[int(word)] for word in encoder_ids])
        if reading.batches is not None:
            gradient = gradient * reading.batches.factors(len(gradient))[:, None]
            evaluated = reading.batches.masks(len(gradient))[-1] > 0
        return cls(rows, target, read, gradient, own_row, encoder_read, evaluated)

    @functools.cached_property
    def reads(self) -> Array:
        """(T, V') 1 where a token of the main stream looks up a word."""
        return self.of_stream(main=True)

    def of_stream(self, main: bool) -> Array:
        """`reads`, of the tokens of the main stream or of the encoder."""
        read = self.read if main else self.encoder_read
        return np.asarray(read[:, None] == np.arange(len(self.rows)), float)


def tied_overlap(reading: Reading, words: Words) -> Array:
    """(T, T) E x_t delta_s along the skip path of a tied head, the same at any point of the stream.

    x_t contains the vector of the word that t looks up, delta_s those of all words of s's loss:
    k_s scale variance c_{s, word of t}, k the coefficient of a token's own row in the input of the
    head, less the projection of the last norm. Factors of skip connections in x and delta cancel.
    """
    readout, k = reading.readout, words.own_row
    if not k.any():
        return np.zeros_like(reading.last.kernel)
    overlap = (
        readout.scale * readout.weight_variance * k[None, :] * words.logit_gradient[:, words.read].T
    )
    if readout.normalised:
        kernel = reading.last.kernel
        overlap = overlap - np.diag(overlap)[None, :] * kernel / np.diag(kernel)[None, :]
    return np.asarray(overlap)


@dataclass(frozen=True, eq=False)
class Entered:
    """The step of the tables.

    Attributes:
        change: of the sum of what tokens look up.
        effects: step of every table at learning rate 1.
        along: (T, T) A of u_t = -sum_s A_ts x_s + ..., x the input of a tied head.
    """

    change: Change
    effects: tuple[tuple[str, StepSize], ...]
    along: Array


def _row_blocks(reading: Reading, words: Words, tied: Array) -> Array:
    """(V', k, k) covariance over k steps of an entry of the gradient of each row of the matrix to
    the logits; `tied` is `tied_overlap`."""
    readout, batches = reading.readout, reading.batches
    kernel = np.asarray(readout.kernel.off_diagonal)

    def split(values: Array) -> Array:
        """(k, T, V') values at the tokens of each step, else 0."""
        if batches is None:
            return values[None]
        return np.asarray(batches.masks(len(values))[:, :, None] * values)

    logit_gradient = split(words.logit_gradient)
    blocks = readout.scale**2 * np.einsum("itv,jtv->vij", logit_gradient, kernel @ logit_gradient)
    table = reading.main.token_table
    if table is None or not reading.tied:
        return np.asarray(blocks)
    for stream in reading.streams:
        reads = split(words.of_stream(stream is reading.main))
        gathered = np.einsum("itv,jtv->vij", reads, stream.received @ reads)
        blocks = blocks + table.amplitude**2 * gathered
    at_head = tied * (words.own_row / table.amplitude)[:, None]
    cross = np.einsum("itv,jtv->vij", logit_gradient, at_head @ split(words.reads))
    cross = cross + np.swapaxes(cross, 1, 2)
    return np.asarray(blocks + readout.scale * table.amplitude * cross)


def _table_blocks(reading: Reading, table: Table, gradient: Array) -> Array:
    """(T, k, k) covariance over k steps of an entry of the gradient of each token's row."""
    same, batches = table.amplitude * table.same, reading.batches
    if batches is None:
        return np.asarray(((same @ gradient) * same).sum(1)[:, None, None])
    parts = batches.masks(len(same))[:, None, :] * same
    return np.asarray(np.einsum("its,jts->tij", parts @ gradient, parts))


class _RowSteps(NamedTuple):
    """Steps of rows whose gradients are sums over tokens, at learning rate 1.

    Attributes:
        pulled: (rows, T) coefficients of the step on the tokens' gradients.
        noise: (rows,) E U^2.
        slope, square: sums over rows of minus the loss's derivative and of E U^2, of an entry.
    """

    pulled: Array
    noise: Array
    slope: float
    square: float

    @classmethod
    def of(
        cls, optimizer: Optimizer, blocks: Array, weights: Array, tokens: int, counts: Array
    ) -> _RowSteps:
        """From the gradients' covariance over steps, (rows, k, k), of `weights` rows each. `counts`
        weigh the mean of variances from which the damping by Adam's epsilon is computed."""
        variances = np.maximum(blocks.sum((1, 2)), 0.0)
        pulled, noise = np.ones((len(blocks), 1)), variances
        if optimizer.others != "sgd" and optimizer.batches is not None:
            steps = [optimizer.batches.regressed(block) for block in blocks]
            pulled, noise = (np.array(part) for part in zip(*steps, strict=True))
        elif optimizer.others != "sgd":
            size = float((counts * variances).sum() / counts.sum())
            damped, spread = damping(size**0.5, optimizer.epsilon)
            deviations = np.sqrt(variances)
            nonzero = deviations > 1e-12 * deviations.max(initial=0.0)
            inverse = np.divide(1.0, deviations, out=np.zeros_like(deviations), where=nonzero)
            pulled, noise = SIGN_MEAN * damped * inverse[:, None], np.full(len(blocks), spread)
        slope, square = weights @ (pulled[:, 0] * variances), weights @ noise
        if pulled.shape[1] > 1 and optimizer.batches is not None:
            pulled = optimizer.batches.spread(pulled, tokens)
        pulled = np.broadcast_to(pulled, (len(blocks), tokens))
        return cls(pulled, noise, float(slope), float(square))


def entered(
    reading: Reading, words: Words, optimizer: Optimizer, rate: float, stream: Stream, tied: Array
) -> Entered:
    """The step of a stream's tables; one that both streams use is listed with the main stream.
    `tied` is `tied_overlap`."""
    gradient, main = stream.received, stream is reading.main
    count, d = len(gradient), float(reading.model.d_model)
    zeros = np.zeros((count, count))
    coherent, overlap, total, along = zeros.copy(), zeros.copy(), zeros.copy(), zeros
    effects: list[tuple[str, StepSize]] = []
    tables, rule = stream.tables, optimizer.others
    prefix = "" if main else ENCODER
    names = [table.name if table.name == "token" else prefix + table.name for table in tables]
    rates = [rate * optimizer.factor(name) for name in names]
    # covariance of the gradients of two tokens' rows, by pairs of tables
    grams: dict[tuple[int, int], Array] = {}
    for i, one in enumerate(tables):
        for j, other in enumerate(tables[: i + 1]):
            scale = one.amplitude * other.amplitude
            grams[i, j] = scale * one.same @ gradient @ other.same
            grams[j, i] = grams[i, j].T
    tied_table = reading.tied and stream.token_table is not None
    if tied_table:
        # gradients of rows also have terms of the head and of another stream's tokens, by word
        row_blocks = _row_blocks(reading, words, tied if main else 0 * reading.main.before)
        rows = np.maximum(row_blocks.sum((1, 2)), 0.0)
        readout = reading.readout
        logit_gradient = readout.scale * words.logit_gradient
        gathered = logit_gradient.T @ np.asarray(readout.kernel.off_diagonal) @ logit_gradient
        for source in reading.streams:
            if source is not stream:
                reads = words.of_stream(source is reading.main)
                gathered = gathered + tables[0].amplitude ** 2 * (reads.T @ source.received @ reads)
        reads = words.of_stream(main)
        grams[0, 0] = grams[0, 0] + reads @ gathered @ reads.T
        np.fill_diagonal(grams[0, 0], reads @ rows)
    deviations = [np.sqrt(np.maximum(np.diag(grams[i, i]), 0.0)) for i in range(len(tables))]
    noises: list[Array] = []
    for i, table in enumerate(tables):
        if tied_table and i == 0:
            row_of_token = words.read if main else words.encoder_read
            blocks, weights, counts = row_blocks, words.rows, words.rows
        else:
            first, row_of_token, counts = table.places
            blocks = _table_blocks(reading, table, gradient)[first]
            weights = (table.rows[first] >= 0).astype(float)
        steps = _RowSteps.of(optimizer, blocks, weights, count, counts)
        pulled, amplitude = steps.pulled[row_of_token], table.amplitude
        noises.append(np.sqrt(steps.noise[row_of_token]))
        coherent += rates[i] * amplitude**2 * pulled * table.same
        if main or not (tied_table and i == 0):
            effects.append((table.name, StepSize(d * steps.slope, steps.square / table.count)))
        if main and tied_table and i == 0:
            # the row also moves along the head's inputs at the tokens in whose loss it is
            at_head = reading.readout.scale * words.logit_gradient[:, words.read].T
            along = rates[i] * (pulled * at_head) * words.own_row
            overlap -= along @ stream.before
    for (i, j), covariance in grams.items():
        if rule != "sgd":
            covariance = _of_signs(covariance, deviations[i], noises[i], deviations[j], noises[j])
        sizes = tables[i].amplitude * tables[j].amplitude
        total += rates[i] * rates[j] * sizes * covariance
    if stream.patch is not None:
        rows = [
            _Rows(rates[i] * table.amplitude, table, deviations[i], noises[i])
            for i, table in enumerate(tables)
        ]
        change, size = _patches(stream.patch, d, optimizer, rate, gradient, rows)
        coherent, total = coherent + change.coherent, total + change.total
        effects.append(("patch", size))
    overlap -= coherent @ tied.T
    return Entered(Change(coherent, overlap, total, zeros), tuple(effects), along)


def _of_signs(
    covariance: Array, one: Array, one_noise: Array, two: Array, two_noise: Array
) -> Array:
    """Covariance of steps under the sign rule, from the covariance and standard deviations of their
    Gaussian gradients and the roots of E U^2."""
    both = np.outer(one, two)
    r = np.divide(covariance, both, out=np.zeros_like(both), where=both > 0)
    return np.asarray(np.outer(one_noise, two_noise) * 2 / np.pi * np.arcsin(np.clip(r, -1.0, 1.0)))


class _Rows(NamedTuple):
    """Step of a table next to a projection of patches: its rate, and for every token's row the
    standard deviation of the gradient and the root of E U^2."""

    rate: float
    table: Table
    deviations: Array
    noises: Array


def _patches(
    pixels: Array, d: float, optimizer: Optimizer, rate: float, gradient: Array, rows: list[_Rows]
) -> tuple[Change, StepSize]:
    """The step of the projection of patches. Given the pixels, entries of its gradient are Gaussian
    of variance x_b^T D x_b at pixel b. The covariance with the steps of the tables' `rows`, whose
    gradients are from the same tokens, is included in the change."""
    rule = optimizer.others
    size = ((gradient @ pixels) * pixels).sum(0)
    total_size, count = float(size.sum()), pixels.shape[1]
    step = rate * optimizer.factor("patch")
    deviations, noise = np.sqrt(np.maximum(size, 0.0)), 1.0
    if rule == "sgd":
        coherent = pixels @ pixels.T
        total = coherent @ gradient @ coherent
        step_size = StepSize(d * total_size, total_size / count)
    else:
        nonzero = size > 1e-18 * size.max(initial=0.0)
        root = np.where(nonzero, np.sqrt(np.where(nonzero, size, 1.0)), 1.0)
        scaled = np.where(nonzero, pixels / root, 0.0)
        coherent = SIGN_MEAN * scaled @ pixels.T
        corr = np.clip(scaled.T @ gradient @ scaled, -1.0, 1.0)
        total = pixels @ (2 / np.pi * np.arcsin(corr)) @ pixels.T
        along, noise = optimizer.pulled((pixels @ pixels.T) * gradient / count)
        slope = SIGN_MEAN * d * along * float((root * nonzero).sum())
        step_size = StepSize(slope, noise * float(nonzero.mean()))
        coherent, total = along * coherent, noise * total
    shared = np.zeros_like(gradient)
    for own in rows:
        cross = own.table.amplitude * own.table.same @ gradient @ pixels
        if rule != "sgd":
            spread = np.full(count, noise**0.5)
            cross = _of_signs(cross, own.deviations, own.noises, deviations, spread)
        shared += own.rate * step * cross @ pixels.T
    total = step * step * total + shared + shared.T
    return dataclasses.replace(Change.of(step * coherent), total=total), step_size


@dataclass(frozen=True, eq=False)
class Ending:
    """The logits after a step.

    Attributes:
        loss: expected mean cross-entropy of Gaussian logits (`_loss`).
        change: mean square of the change of a logit, over tokens and words.
        after: mean square of a logit.
        effects: steps of the head's own parameters at learning rate 1, by name.
    """

    loss: float
    change: float
    after: float
    effects: tuple[tuple[str, StepSize], ...]


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
    """The logits and the loss after a step.

    Args:
        change: of the input of the matrix to the logits.
        gradient: E delta delta of that input.
        kept: (T,) factor of the token's own row behind the last norm, relative to before the step.
    """
    readout = reading.readout
    if readout.softcap is not None or readout.smoothing:
        what = "logit_softcap" if readout.softcap is not None else "label_smoothing"
        raise DomainError(f"the first step does not cover a head's {what}")
    d, scale, variance = float(readout.width), readout.scale, readout.weight_variance
    kernel = np.asarray(readout.kernel.off_diagonal)
    name = "token" if reading.tied else "head"
    step = rate * optimizer.factor(name)
    decay = optimizer.decay(name, rate)
    blocks, logit_gradient = _row_blocks(reading, words, tied), words.logit_gradient
    steps = _RowSteps.of(optimizer, blocks, words.rows, len(kernel), words.rows)
    pulled, total_rows = steps.pulled.T, float(words.rows.sum())
    own = -step * scale**2 * d * (change.updated_overlap(kernel) @ (pulled * logit_gradient))
    table = reading.main.token_table
    if reading.tied and table is not None:
        # rows that tokens look up also step along the gradients of these tokens
        amplitude = table.amplitude
        k = words.own_row / amplitude
        received = tied * k[:, None] - (change.coherent @ gradient) * k[None, :]
        own -= step * scale * d * amplitude * (received @ (pulled * words.reads))
    through = -(scale**2) * d * variance * decay * (change.coherent @ logit_gradient)
    mean = own + through
    effects = []
    if not reading.tied:
        effects.append((name, StepSize(d * steps.slope, steps.square / total_rows)))
    if reading.model.head.bias:
        sums = logit_gradient.sum(0)
        shift = sums if optimizer.others == "sgd" else np.sign(sums)
        if reading.batches is not None and optimizer.others != "sgd":
            # each step's own gradient of the logits, summed over tokens
            own_sums = (
                reading.batches.masks(len(logit_gradient))
                @ logit_gradient
                / reading.batches.weights[:, None]
            )
            shift = reading.batches.updates.sum(own_sums)
        factor = rate * optimizer.factor("head.bias")
        mean = mean - factor * shift
        gained = float((words.rows * np.abs(sums * shift)).sum())
        square = float((words.rows * shift**2).sum() / total_rows)
        effects.append(("head.bias", StepSize(gained, square)))
    size = scale**2 * d * variance * np.diag(change.total)
    changed = float(np.mean((mean**2 @ words.rows) / total_rows + size))
    every = np.arange(len(kernel))
    spread = scale**2 * d * variance * decay**2 * np.diag(change.new(kernel))
    if words.own_row.any():
        mean[every, words.read] += scale * d * variance * decay * words.own_row * kept
    loss = _loss(mean, spread, words)
    after = float(np.mean((mean**2 @ words.rows) / total_rows + spread))
    return Ending(loss, changed, after, tuple(effects))


_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(24)


def _loss(mean: Array, variance: Array, words: Words) -> float:
    """E mean_t [log sum_v exp z_tv - z_t,target] of Gaussian logits of these means and variances.

    The mean over the target's logit is by quadrature; the sum of the others is at its mean.
    """
    evaluated = True if words.evaluated is None else words.evaluated
    tokens = np.flatnonzero((words.target >= 0) & evaluated)
    target, weights = words.target[tokens], _WEIGHTS / _WEIGHTS.sum()
    logits = mean[tokens] + np.log(words.rows)
    logits = logits + variance[tokens, None] / 2
    aim = mean[tokens, target]
    logits[np.arange(len(tokens)), target] = -np.inf
    others = np.logaddexp.reduce(logits, axis=1)
    at = aim[:, None] + np.sqrt(variance[tokens])[:, None] * _NODES
    both = np.logaddexp(others[:, None], at)
    return float(np.mean(both @ weights - aim))
