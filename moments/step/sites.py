"""What a step reads of a prediction: the only module here that knows how the engine keeps it.

A `Site` is one point of the network with the kernels that both passes left there, as plain
matrices over all tokens of the batch. Sites come in the order of the forward pass, which is that of
the declaration.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.composition import Chain
from ..engine.realised import has_fixed_norms
from ..engine.state import Kernel, Signal
from ..engine.trace import Point, Trace
from ..errors import DomainError
from ..model.patches import PatchEmbedding
from ..transfer.architecture import declare, declare_embedding
from ..transfer.attention.self_attention import AttentionPulled, SelfAttention
from ..transfer.embedding import joint_kernel, table_rows
from ..transfer.head.readout import Readout
from ..transfer.images import cut_patches, image_kernel
from .attention import Rows, Three
from .change import Array
from .neurons import Neurons
from .rules import Root, Signs

if TYPE_CHECKING:
    from ..prediction.result import Prediction


@dataclass(frozen=True, eq=False)
class Site:
    """One point of the network.

    Attributes:
        index: its place in the forward pass.
        layer, name: of the point.
        signal: what passes; None where the tables are summed, before anything is recorded.
        kernel: E x_t x_s per feature.
        gradient: E delta delta per feature, of the loss on the whole batch.
        width: features.
        attended: what the attention that reads it can tell; None: none does.
    """

    index: int
    layer: int
    name: str
    signal: Signal | None
    kernel: Array
    gradient: Array
    width: float
    attended: Any = None

    @classmethod
    def of(cls, index: int, point: Point, attended: Any = None) -> Site:
        assert point.gradient is not None
        return cls(
            index,
            point.layer,
            point.site,
            point.signal,
            np.asarray(point.signal.second_moment().pairs, float),
            np.asarray(point.gradient.kernel.pairs, float),
            float(point.signal.width),
            attended,
        )

    def excess(self) -> float:
        """Relative variance of two tokens' overlap beyond the 1/width of independent features.

        Features that are a random map of fewer others (hidden units, heads) have it; behind a
        normalisation there is none.
        """
        signal = self.signal
        if signal is None or has_fixed_norms(signal) or signal.spread is None:
            return 0.0
        varies = signal.spread if signal.realised is None else signal.realised.overlaps
        size = 2 * float((self.kernel**2).sum())
        if size == 0.0:
            return 0.0
        return max(float(np.asarray(varies.pairs).sum()) / size - 1 / self.width, 0.0)

    def attention_rows(self, leaf: Any, leaving: Site) -> Rows:
        """The attention that reads this site and whose heads are `leaving`."""
        assert self.signal is not None
        for name, there in {
            "qk_norm": leaf.qk_norm is not None,
            "logit_softcap": leaf.logit_softcap is not None,
            "biases of queries": bool(leaf.query_bias),
            "biases of keys": bool(leaf.key_bias),
            "relative_bias": leaf.relative_bias is not None,
        }.items():
            if there:
                raise DomainError(f"the first step does not cover {name} ({leaf.label})")
        heads, d = float(leaf.heads * leaf.d_head), float(leaf.d_model)
        shared = float(leaf.kv_heads or leaf.heads) * float(leaf.d_head)
        value, query, key = (
            max(float(getattr(leaf, name)), 1e-60) for name in ("value", "query", "key")
        )
        assert leaving.signal is not None
        received = Kernel.of_matrix(leaving.gradient).scaled(heads * value)
        if not isinstance(self.attended, AttentionPulled):
            raise DomainError(f"the first step resolves attention by token ({leaf.label})")
        layer, paths = self.attended.way.layer, self.attended.sides
        found = Three(*(np.asarray(path.pairs) for path in (paths.query, paths.key, paths.value)))
        return Rows.of(
            self.kernel,
            np.asarray(layer.weights()),
            np.asarray(layer.response().pairs),
            d * value,
            np.asarray(received.pairs),
            found,
            Three(
                found.query / (heads * query),
                found.key / (shared * key),
                found.value / (shared * value),
            ),
            int(leaf.sequences),
        )


@dataclass(frozen=True, eq=False)
class Table:
    """Rows that tokens look up.

    Attributes:
        name: of the parameter.
        rows: (T,) the row of each token; negative: none.
        amplitude: multiplies what is looked up.
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
        there = self.rows[:, None] == self.rows[None, :]
        return np.asarray(there & (self.rows[:, None] >= 0), float)

    def once(self, values: Array) -> float:
        """Sum over rows of a number that each of a row's tokens has."""
        _, first = np.unique(self.rows, return_index=True)
        return float(values[first[self.rows[first] >= 0]].sum())


@dataclass(frozen=True, eq=False)
class Reading:
    """A prediction as a step reads it.

    Attributes:
        model: the declaration.
        embedding, layers, head: what the walk goes through.
        before, received: (T, T) kernels of the summed tables and of the gradient there.
        points: every site, in order.
        readout: the matrix to the logits.
        targets: of the loss, for every row of the logits, -1 for none.
        tables: what tokens look up, the token table first.
        patch: (T, pixels) what a patch projection reads; None: there is none.
        token_ids: (T,) the text; -1 where there is none.
        loss, logit_variance: as predicted.
    """

    model: Any
    embedding: Chain
    layers: Chain
    head: Chain
    before: Array
    received: Array
    points: tuple[Site, ...]
    readout: Readout
    targets: Any
    tables: tuple[Table, ...]
    patch: Array | None
    token_ids: Any
    loss: float
    logit_variance: float

    @classmethod
    def of(cls, prediction: Prediction) -> Reading:
        """Read a prediction of a text or of images.

        Raises:
            DomainError: it is not resolved by token, has no loss, or its model has what a step
                does not cover.
        """
        model, read = prediction.model, prediction.read
        _check(prediction)
        outer = prediction.outer_weights
        assert read is not None
        assert outer is not None
        assert outer.received is not None
        inputs, layout = read.inputs, prediction.layout
        points = _sites(prediction.trace)
        chain, readout = read.ending
        length, d = model.seq_len, model.d_model
        if isinstance(model.embedding, PatchEmbedding):
            before = np.asarray(image_kernel(model.embedding, inputs.pixels).pairs)
            tables, patch = _of_images(model.embedding, inputs.pixels)
            ids = np.full(len(before), -1)
        else:
            given = inputs.token_ids, inputs.segment_ids
            before = np.asarray(joint_kernel(model.embedding, length, *given, d).pairs)
            rows = table_rows(model.embedding, length, *given, None)
            tables, patch = _of_text(model.embedding, rows), None
            ids = rows[0]
        return cls(
            model,
            declare_embedding(model.embedding, model, "refined"),
            declare(model, "refined", layout.padding, layout.sequences),
            chain,
            before,
            np.asarray(outer.received.kernel.pairs),
            points,
            readout,
            _targets(model, read, layout.sequences),
            tables,
            patch,
            ids,
            float(prediction.loss),
            float(prediction.logit_variance),
        )

    @property
    def tied(self) -> bool:
        """Whether the matrix to the logits is the token table."""
        return bool(self.model.head.tied)

    @property
    def token_table(self) -> Table | None:
        return next((table for table in self.tables if table.name == "token"), None)

    @functools.cached_property
    def logit_spread(self) -> float:
        """The largest variance of attention's logits within rows, averaged over a layer's rows."""
        diagnostics = [site.signal.diagnostics for site in self.points if site.signal is not None]
        found = [float(np.mean(one["logit_variance"])) for one in diagnostics if one is not None]
        return max(found, default=0.0)

    @functools.cached_property
    def rows(self) -> dict[int, Rows]:
        """Attention that was read already, by the index of its site."""
        return {}

    @functools.cached_property
    def neurons(self) -> dict[int, Neurons | None]:
        """Hidden units that were drawn already, likewise."""
        return {}

    @functools.cached_property
    def signs(self) -> dict[tuple[int, str], Signs]:
        """What is not Gaussian at matrices, which all learning rates share."""
        return {}

    @functools.cached_property
    def roots(self) -> dict[int, Root]:
        """Eigenvalues of sites' kernels, likewise."""
        return {}

    @functools.cached_property
    def spectra(self) -> dict[tuple[int, str], Any]:
        """Eigenvalues of matrices, which all learning rates share."""
        return {}

    @property
    def last(self) -> Site:
        """What leaves the last layer."""
        return [site for site in self.points if site.name == "stream"][-1]


def _sites(trace: Trace) -> tuple[Site, ...]:
    """Every point in the order of the forward pass, with the attention that reads it."""
    found: list[tuple[Point, Any]] = []
    attended: dict[int, Any] = {}
    for record in (trace.embedding, None, trace.stack, trace.ending):
        if record is None:
            if not any(point.site == "stream" for point, _ in found):
                sent = None if trace.stack is None else trace.stack.sent
                found.append((Point(0, "stream", trace.entering, sent), trace.entering))
            continue
        for one in record.walk():
            if isinstance(one.component, SelfAttention):
                attended[id(one.input)] = one.pulled
            if one.component.label:
                found.append((one.point, one.output))
    return tuple(
        Site.of(k, point, attended.get(id(signal))) for k, (point, signal) in enumerate(found)
    )


def _check(prediction: Prediction) -> None:
    model, remedy = prediction.model, ""
    if prediction.theory != "refined":
        raise DomainError(f'theory {prediction.theory!r} has no first step: use theory="refined"')
    read = prediction.read
    if read is None or prediction.loss is None:
        raise DomainError(
            "a first step needs a loss: declare model.head with one, and leave grad_variance, "
            "grad_correlation and grad_kernel out"
        )
    inputs = read.inputs
    if prediction.layout.classes is not None or (
        inputs.token_ids is None and inputs.pixels is None
    ):
        raise DomainError(
            "a first step is that of a batch: predict with its token_ids (or pixels), as "
            "moments.text.tokenize makes them"
        )
    beyond = {
        "an encoder beside a decoder": model.encoder is not None,
        "attention_mask": inputs.attention_mask is not None,
        "document_ids": inputs.document_ids is not None,
        "batch beyond the sequences given": prediction.batch != 1,
        "an embedding that is described by variance, correlation or kernel": inputs.moments,
        "tables or heads whose padding_id has no row": getattr(model.embedding, "padding_id", None)
        is not None
        and inputs.token_ids is not None
        and bool(np.any(np.asarray(inputs.token_ids) == model.embedding.padding_id)),
    }
    for name, there in beyond.items():
        if there:
            raise DomainError(f"the first step does not cover {name}{remedy}")


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
        found = np.full(ids.shape, -1)
        found[:, :-1] = ids[:, 1:]
        return found.reshape(-1)
    chosen = np.asarray(given).reshape(-1)
    return np.where(chosen < 0, -1, chosen)


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
    cut = cut_patches(embedding, pixels)
    count = len(cut)
    if embedding.class_token:
        cut = np.concatenate([np.zeros_like(cut[:, :1]), cut], axis=1)
    where = np.tile(np.arange(embedding.seq_len), count)
    tables = []
    first = (where == 0) & bool(embedding.class_token)
    if embedding.class_token:
        rows = np.where(first, 0, -1)
        tables.append(Table("class", rows, 1.0, float(embedding.class_variance), 1))
    if embedding.position_variance > 0:
        tables.append(
            Table("position", where, 1.0, float(embedding.position_variance), embedding.seq_len)
        )
    if embedding.bias_variance is not None:
        tables.append(Table("patch.bias", np.where(first, -1, 0), 1.0, embedding.bias_variance, 1))
    return tuple(tables), np.asarray(cut.reshape(len(where), -1), float)
