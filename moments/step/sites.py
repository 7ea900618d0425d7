"""Inputs of a step from a prediction: the only module here that depends on the engine's storage.

A `Site` is one point of the network with the kernels of signal and gradient, as plain matrices over
all tokens of the batch. Sites are in the order of the forward pass, that of the declaration.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..engine.composition import Chain, added
from ..engine.fluctuation import has_fixed_norms
from ..engine.state import Kernel, Signal
from ..engine.texts import TextClasses
from ..engine.trace import Point, Trace
from ..errors import DomainError
from ..layers.architecture import declare, declare_embedding, declare_output
from ..layers.attention.self_attention import AttentionPulled
from ..layers.embedding import table_rows, text_kernel
from ..layers.head.readout import Readout
from ..layers.images import image_kernel, patch_layout
from ..model.embedding import Embedding
from ..model.patches import PatchEmbedding, SoundEmbedding
from .change import Array
from .several import Batches, Updates

if TYPE_CHECKING:
    from ..prediction.result import Prediction

Result = TypeVar("Result")

ENCODER = "encoder."
"""Prefix of the names of an encoder's sites and parameters in a model with a decoder."""


@dataclass(frozen=True, eq=False)
class Site:
    """One point of the network.

    Attributes:
        index: position in the forward pass; inside a component, with a name.
        layer, name: of the point.
        signal: the recorded signal; None at the sum of the tables, which is not recorded.
        kernel: E x_t x_s per feature.
        gradient: E delta delta per feature, of the loss on the whole batch.
        width: features.
        attended: backward pass of the attention that reads it, or None.
        weights: (T,) factors by which its tokens' gradients were multiplied, or None.
    """

    index: Any
    layer: int
    name: str
    signal: Signal | None
    kernel: Array
    gradient: Array
    width: float
    attended: Any = None
    weights: Array | None = None

    def weighted(self, batches: Batches) -> Site:
        """The site with gradients weighted by batch."""
        factors = batches.factors(len(self.kernel))
        gradient = self.gradient * np.outer(factors, factors)
        return dataclasses.replace(self, gradient=gradient, weights=factors)

    def inner(self, name: str, kernel: Array, gradient: Array, width: float) -> Site:
        """The input of a matrix of that name inside the component that reads this site."""
        return Site((self.index, name), self.layer, name, None, kernel, gradient, width)

    def plus(self, other: Site) -> Site:
        """The sum of two branches that read one tensor; both have the gradient of the sum."""
        assert self.signal is not None
        assert other.signal is not None
        total = added(self.signal, other.signal, 1.0, 1.0, parallel=True)
        kernel = np.asarray(total.second_moment().off_diagonal, float)
        return dataclasses.replace(other, signal=total, kernel=kernel)

    @classmethod
    def of(cls, index: int, prefix: str, point: Point, attended: Any = None) -> Site:
        assert point.gradient is not None
        return cls(
            index,
            point.layer,
            prefix + point.site,
            point.signal,
            over_tokens(point.signal.second_moment()),
            over_tokens(point.gradient.kernel),
            float(point.signal.width),
            attended,
        )

    def attention_gradients(self, leaf: Any, memory: Site) -> dict[str, Array]:
        """(T, T) gradients per feature at queries, keys and values of the attention that reads this
        site and the tokens of `memory`; empty if the engine has none."""
        if self.attended is None:
            return {}
        width = float(leaf.heads * leaf.d_head)
        shared = width * float(leaf.kv_heads or leaf.heads) / float(leaf.heads)
        # all paths are on the scale of the tokens attended to
        rows = width * leaf.d_model / leaf.memory_width, shared, shared
        result = {}
        for name, many, at in zip(
            ("query", "key", "value"), rows, (self, memory, memory), strict=True
        ):
            path = over_tokens(getattr(self.attended.paths, name))
            weighted = 1.0 if at.weights is None else np.outer(at.weights, at.weights)
            result[name] = weighted * path / (many * max(float(getattr(leaf, name)), 1e-60))
        return result

    def excess(self) -> float:
        """Relative variance of two tokens' overlap beyond the 1/width of independent features.

        Features that are a random map of fewer others (hidden units, heads) have it; behind a
        normalisation there is none.
        """
        signal = self.signal
        if signal is None or has_fixed_norms(signal) or signal.fluctuation is None:
            return 0.0
        norms, overlaps, *_ = signal.fluctuation
        varies = norms if overlaps is None else overlaps
        size = 2 * float((self.kernel**2).sum())
        if size == 0.0:
            return 0.0
        return max(float(np.asarray(varies.off_diagonal).sum()) / size - 1 / self.width, 0.0)


def over_tokens(kernel: Kernel) -> Array:
    """(T, T) matrix of a kernel; one on classes is interpolated between its nodes, linearly in log
    position, by whether two tokens share a sequence and a word."""
    classes = kernel.classes
    if classes is None:
        return np.asarray(kernel.off_diagonal, float)
    between, sequences = np.asarray(classes.one_document.basis), len(classes.document_lengths)
    length = between.shape[1]
    blocks = []
    cells = np.asarray(kernel.diagonal), np.asarray(kernel.off_diagonal)
    for diagonal, off_diagonal in classes.blocks_by_word(*cells):
        block = between.T @ off_diagonal @ between
        np.fill_diagonal(block, diagonal @ between)
        blocks.append(block.astype(np.float32))
    shape, every = (sequences, length, sequences, length), min(sequences, 2)
    result: Array = np.empty(shape, np.float32)
    there: Array = np.ones(shape, bool)
    for k in range(0, len(blocks), every):
        if k:
            assert isinstance(classes, TextClasses)
            assert classes.ids is not None
            words = np.ravel(classes.ids)
            there = (words[:, None] == words).reshape(shape)
        np.copyto(result, blocks[k + every - 1][:, None], where=there)
        for one in range(sequences):
            np.copyto(result[one, :, one], blocks[k], where=there[one, :, one])
    return np.reshape(result, (sequences * length, -1))


@dataclass(frozen=True, eq=False)
class Table:
    """Rows that tokens look up.

    Attributes:
        name: of the parameter.
        rows: (T,) row of each token; negative for none.
        amplitude: factor on the rows.
        variance: of the entries.
        count: rows of the table.
    """

    name: str
    rows: Any
    amplitude: float
    variance: float
    count: int

    @functools.cached_property
    def same(self) -> Array:
        """(T, T) 1 where two tokens look up one row."""
        equal = self.rows[:, None] == self.rows[None, :]
        return np.asarray(equal & (self.rows[:, None] >= 0), float)

    @functools.cached_property
    def places(self) -> tuple[Any, Any, Any]:
        """Of the rows that are looked up: the first token of each, the index of each token's row
        among them, and the number of tokens of each."""
        result = np.unique(self.rows, return_index=True, return_inverse=True, return_counts=True)
        return result[1:]


@dataclass(frozen=True, eq=False)
class Stream:
    """The embedding, components and inputs of one stream of tokens.

    Attributes:
        embedding, layers, ending: components, in order.
        before, received: (T, T) kernels of the sum of the tables and of the gradient at it.
        tables: tables whose rows the tokens look up, the token table first.
        patch: (T, pixels) input of a patch projection, or None.
        token_ids: (T,) the text; -1 for images.
    """

    embedding: Chain
    layers: Chain
    ending: Chain
    before: Array
    received: Array
    tables: tuple[Table, ...]
    patch: Array | None
    token_ids: Any

    @classmethod
    def of(cls, prediction: Prediction, inputs: Any, ending: Chain) -> Stream:
        model, layout, outer = prediction.model, prediction.layout, prediction.outer_weights
        assert outer is not None
        assert outer.gradient is not None
        length, d = model.seq_len, model.d_model
        if isinstance(model.embedding, PatchEmbedding):
            before = np.asarray(image_kernel(model.embedding, inputs.pixels, d).off_diagonal)
            tables, patch = _of_images(model.embedding, inputs.pixels)
            ids = np.full(len(before), -1)
        else:
            assert model.embedding is not None
            given = inputs.token_ids, inputs.segment_ids
            before = np.asarray(text_kernel(model.embedding, length, *given, d).off_diagonal)
            rows = table_rows(model.embedding, length, *given, None)
            tables, patch = _of_text(model.embedding, rows), None
            ids = rows[0]
        return cls(
            declare_embedding(model.embedding, model, "refined"),  # type: ignore[arg-type]
            declare(model, "refined", *layout.places),
            ending,
            before,
            over_tokens(outer.gradient.kernel),
            tables,
            patch,
            ids,
        )

    def weighted(self, batches: Batches) -> Stream:
        """The stream with gradients weighted by batch."""
        factors = batches.factors(len(self.received))
        return dataclasses.replace(self, received=self.received * np.outer(factors, factors))

    @property
    def token_table(self) -> Table | None:
        return next((table for table in self.tables if table.name == "token"), None)


@dataclass(frozen=True, eq=False)
class Reading:
    """The parts of a prediction that a step depends on.

    Attributes:
        model: the declaration.
        main: the stream, up to the head.
        encoder: the stream whose output the main one's cross-attention reads, or None. Both look up
            one token table, which is also the head's.
        points: every site, in order; those of an encoder first, with the prefix "encoder.".
        readout: the matrix to the logits.
        targets: target of every row of the logits, -1 for none.
        loss, logit_variance: predictions at initialisation.
        norms: computes the squared norms of the parameters' gradients, by layer and name.
        sequences: number of sequences.
        batches: of several steps, or None.
    """

    model: Any
    main: Stream
    encoder: Stream | None
    points: tuple[Site, ...]
    readout: Readout
    targets: Any
    loss: float
    logit_variance: float
    norms: Callable[[], Mapping[tuple[int, str], float]]
    sequences: int = 1
    batches: Batches | None = None

    def stepped(self, updates: Updates) -> Reading:
        """The reading for several steps, each on the same number of sequences.

        Raises:
            DomainError: steps do not divide the sequences, or a step's batch has no targets.
        """
        sequences, k = self.sequences, updates.steps
        if sequences % k:
            raise DomainError(
                f"steps = {k}: the {sequences} sequences of the prediction are the steps' batches, "
                "as many for each"
            )
        batch = np.repeat(np.arange(k), sequences // k)
        active = self.targets >= 0
        counts = np.bincount(np.repeat(batch, len(active) // sequences)[active], minlength=k)
        if not np.all(counts):
            raise DomainError("every step's batch needs targets")
        loss_factors = counts.sum() / counts
        equal = Batches(updates, batch, np.ones(k), loss_factors)
        # the mean correlation of two batches' gradients over all sites
        products = [
            equal.blocks(site.weighted(equal).gradient * site.kernel) for site in self.points
        ]
        mean = sum(product / max(np.trace(product), 1e-300) for product in products)
        batches = Batches(updates, batch, updates.regression(np.asarray(mean))[0], loss_factors)
        return dataclasses.replace(
            self,
            main=self.main.weighted(batches),
            encoder=None if self.encoder is None else self.encoder.weighted(batches),
            points=tuple(site.weighted(batches) for site in self.points),
            batches=batches,
        )

    @classmethod
    def of(cls, prediction: Prediction) -> Reading:
        """Read a prediction of a text or of images; on classes of positions, by interpolation.

        Raises:
            DomainError: the prediction has no batch or no loss, or its model has a component that
                a step does not cover.
        """
        model, read = prediction.model, prediction.outer_weights
        _check(prediction)
        assert read is not None
        assert read.ending is not None
        chain, readout = read.ending
        classes = readout.kernel.classes
        if classes is not None:
            carried = np.broadcast_to(readout.carried, len(classes.nodes))[
                : len(classes.one_document.basis)
            ]
            readout = dataclasses.replace(
                readout,
                kernel=Kernel.of_matrix(over_tokens(readout.kernel)),
                carried=np.tile(
                    carried @ classes.one_document.basis, len(classes.document_lengths)
                ),
            )
        traces, encoder = [("", prediction.trace)], None
        if prediction.encoder is not None:
            other = prediction.encoder
            assert other.outer_weights is not None
            traces.insert(0, (ENCODER, other.trace))
            ending = declare_output(other.model, "refined")
            encoder = Stream.of(other, other.outer_weights.inputs, ending)
        return cls(
            model,
            Stream.of(prediction, read.inputs, chain),
            encoder,
            _sites(traces),
            readout,
            _targets(model, read, prediction.layout.sequences),
            float(prediction.loss),
            float(prediction.logit_variance),
            functools.cache(functools.partial(_norms, prediction)),
            sequences=prediction.layout.sequences,
        )

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The encoder's stream, if any, and the main one."""
        return (self.main,) if self.encoder is None else (self.encoder, self.main)

    @property
    def tied(self) -> bool:
        """Whether the matrix to the logits is the token table."""
        return bool(self.model.head.tied)

    @functools.cached_property
    def cache(self) -> dict[Any, Any]:
        """Results that steps of all learning rates share, by type and site."""
        return {}

    def once(self, *key: Any, make: Callable[[], Result]) -> Result:
        """The result in `cache` under a key, computed by `make` the first time."""
        if key not in self.cache:
            self.cache[key] = make()
        result: Result = self.cache[key]
        return result

    @property
    def last(self) -> Site:
        """The output of the last layer."""
        return [site for site in self.points if site.name == "stream"][-1]


def _norms(prediction: Prediction) -> dict[tuple[int, str], float]:
    streams = [("", prediction)]
    if prediction.encoder is not None:
        streams.append((ENCODER, prediction.encoder))
    return {
        (layer, before + name): float(np.sum(norm))
        for before, stream in streams
        for layer, name, norm in stream.inner_weights()
    }


def _sites(traces: list[tuple[str, Trace]]) -> tuple[Site, ...]:
    """Every point in the order of the forward pass, with the attention that reads it."""
    points: list[tuple[str, Point, Any]] = []
    attended: dict[int, Any] = {}
    for prefix, trace in traces:
        for record in (trace.embedding, None, trace.stack, trace.ending):
            if record is None:
                if not any(one.site == "stream" for stream, one, _ in points if stream == prefix):
                    gradient = None if trace.stack is None else trace.stack.grad_in
                    point = Point(0, "stream", trace.entering, gradient)
                    points.append((prefix, point, trace.entering))
                continue
            for one in record.walk():
                if isinstance(one.pulled, AttentionPulled):
                    attended[id(one.input)] = one.pulled
                if one.component.label or not one.component.children:
                    points.append((prefix, one.point, one.output))
    return tuple(
        Site.of(k, prefix, point, attended.get(id(signal)))
        for k, (prefix, point, signal) in enumerate(points)
    )


def _check(prediction: Prediction) -> None:
    model = prediction.model
    if prediction.theory != "refined":
        raise DomainError(f'theory {prediction.theory!r} has no first step: use theory="refined"')
    read = prediction.outer_weights
    if read is None or read.ending is None or prediction.loss is None:
        raise DomainError(
            "a first step needs a loss: declare model.head with one, and leave grad_variance, "
            "grad_correlation and grad_kernel out"
        )
    inputs = read.inputs
    if inputs.token_ids is None and inputs.pixels is None:
        raise DomainError(
            "a first step is that of a batch: predict with its token_ids (or pixels), as "
            "moments.text.tokenize makes them"
        )
    not_covered = _not_covered_encoders(prediction) | {
        "attention_mask": inputs.attention_mask is not None,
        "document_ids": inputs.document_ids is not None,
        "batch beyond the sequences given": prediction.batch != 1,
        "convolutions over sound": isinstance(model.embedding, SoundEmbedding),
        "input_mix": model.input_mix is not None,
        "skips": model.skips is not None,
        "values": model.values is not None,
        "per_layer_embedding": model.per_layer_embedding is not None,
        "keys and values of an earlier layer": bool(model.read_again),
        "several residual streams": model.streams is not None,
        "laurel": model.laurel is not None,
        "experts that are delayed or give back what they read": any(
            getattr(block, "apart", False) for block in model.ffns
        ),
        "factor_dim": getattr(model.embedding, "factor_dim", None) is not None
        or getattr(model.head, "factor_dim", None) is not None,
        "an embedding that is described by variance, correlation or kernel": inputs.moments,
        "tables or heads whose padding_id has no row": getattr(model.embedding, "padding_id", None)
        is not None
        and inputs.token_ids is not None
        and bool(np.any(np.asarray(inputs.token_ids) == model.embedding.padding_id)),
    }
    for name, present in not_covered.items():
        if present:
            raise DomainError(f"the first step does not cover {name}")


def _not_covered_encoders(prediction: Prediction) -> dict[str, bool]:
    encoder, main = prediction.encoder, prediction.model
    if encoder is None:
        return {}
    outer = encoder.outer_weights
    assert outer is not None
    own, other = encoder.model.embedding, main.embedding
    text = isinstance(own, Embedding) and isinstance(other, Embedding)
    same = text and (own.vocab_size, own.token_variance) == (other.vocab_size, other.token_variance)
    return {
        "an encoder that reads no text: give encoder_inputs its token_ids": outer.inputs.token_ids
        is None,
        "attention_mask of an encoder": outer.inputs.attention_mask is not None,
        "an encoder with a token table of its own, or with a head that is not tied": not same
        or not main.head.tied,
    }


def _targets(model: Any, read: Any, sequences: int) -> Any:
    """Targets of every row of the logits, -1 for none."""
    head, given = model.head, read.targets
    if head.loss == "classification":
        if given is None:
            raise DomainError("a first step needs the labels: predict with targets=[...]")
        return np.asarray(given).reshape(-1)
    if given is None:
        if head.loss != "causal":
            raise DomainError(
                "a first step needs the targets: predict with targets=..., -100 where there is "
                "none, as moments.text.mask_tokens makes them"
            )
        ids = np.asarray(read.inputs.token_ids).reshape(sequences, model.seq_len)
        chosen = np.full(ids.shape, -1)
        chosen[:, :-1] = ids[:, 1:]
    else:
        chosen = np.asarray(given)
    if not np.any(chosen >= 0):
        raise DomainError(
            "targets: no token has one, and so there is no loss to step on: predict with texts of "
            "two tokens at least, or with targets=... that are not all below 0"
        )
    return np.where(chosen < 0, -1, chosen).reshape(-1)


def _of_text(embedding: Any, rows: Any) -> tuple[Table, ...]:
    (ids, where, segments), words = rows, int(embedding.vocab_size)
    variances = {
        "position": (where, float(embedding.position_variance), int(where.max()) + 1),
        "segment": (segments, float(embedding.segment_variance), 2),
    }
    tables = [Table("token", ids, float(embedding.scale), float(embedding.token_variance), words)]
    tables += [Table(name, at, 1.0, v, n) for name, (at, v, n) in variances.items() if v > 0]
    return tuple(tables)


def _of_images(embedding: Any, pixels: Any) -> tuple[tuple[Table, ...], Array]:
    read, added = patch_layout(embedding, pixels)
    tables = (Table(k, one.rows, 1.0, float(one.variance), one.length) for k, one in added.items())
    return tuple(tables), np.asarray(read, float)
