"""Self-attention with all its gradient paths, for tokens alike or resolved by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...engine.composition import Leaf, Pullback, Pulled
from ...engine.packing import Padding
from ...engine.realised import averaged_overlaps
from ...engine.state import Array, Gradient, Kernel, Realised, Signal
from ...errors import domain_error
from ...model.positions import RelativeBias, Rotary
from .alike import AlikeAttention, averaged
from .by_token import BEYOND_TABLES, attention_facts, mean_spread, self_attention, variance_notes
from .kernels.exact_rows import THETA_PEAKED
from .laws import attend_by_laws
from .logits import LogitLaw, logit_law, positive, through
from .statistics import AttentionStatistics
from .weight_gradients import Paths, of_rows, overlap_gradients, projection_gradients


@dataclass(frozen=True)
class SelfAttention(Leaf):
    """Query, key and value projections, softmax with dropout, heads concatenated.

    Attributes:
        d_model: width of the input.
        heads, d_head: number and width of the heads.
        query, key, value: variances of the projections' entries.
        drop_prob: dropout on the attention weights.
        temperature: divides the logits.
        causal: whether a token sees only itself and earlier ones.
        padding: for every sequence, the document of each token, 0 where it pads; None: one of all.
            A token attends to its own document, and nobody to padding.
        kv_heads: key and value heads, each shared by heads / kv_heads queries; None: heads.
        rotary: how positions turn queries and keys.
        alibi: multiplies the slopes that, times the distance, logits lose; 0: they lose nothing.
        relative_bias: random biases on the logits by relative position.
        qk_norm: normalisation of each head's queries and keys: None, "rmsnorm" or "layernorm".
        logit_softcap: c of c tanh(logit / c); None: uncapped.
        window: a token sees those less than this many positions away; None: all.
        query_bias, key_bias, value_bias: variances of the projections' biases.
        has_bias: which of query, key and value have a bias, be its variance 0, that receives a
            gradient; True: all.
        sequences: number of equally long sequences that the token kernel holds one after the other.
        norm_epsilon: added to the variance under the root of `qk_norm`.
        norm_affine: whether `qk_norm` has gains, shared by the heads, that receive gradients.
    """

    label: str
    d_model: Any
    heads: Any
    d_head: Any
    query: Any
    key: Any
    value: Any
    drop_prob: Any
    temperature: Any = 1.0
    causal: bool = False
    padding: Padding | None = None
    kv_heads: Any = None
    rotary: Rotary | None = None
    alibi: bool | float = False
    relative_bias: RelativeBias | None = None
    qk_norm: str | None = None
    logit_softcap: float | None = None
    window: int | None = None
    query_bias: float = 0.0
    key_bias: float = 0.0
    value_bias: float = 0.0
    has_bias: bool | tuple[str, ...] = ()
    sequences: int = 1
    norm_epsilon: float = 0.0
    norm_affine: bool = False

    mixes_tokens: ClassVar[bool] = True
    prefix: ClassVar[str] = ""

    @property
    def memory_width(self) -> Any:
        """Width of the tokens attended to, which are those that ask."""
        return self.d_model

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        """Moments of the concatenated heads, and the map that carries a gradient back.

        Raises:
            DomainError: tokens alike under a mask or positions that tell them apart.
        """
        if signal.resolved:
            return self._resolved(signal)
        self._check_alike(signal.seq_len)
        plain = self.qk_norm is None and self.logit_softcap is None
        if plain and not np.any(self.query_bias):
            return self._alike_by_laws(signal)
        return self._alike(signal)

    def _resolved(self, signal: Signal) -> tuple[Signal, Pullback]:
        tokens = signal.second_moment()
        law = logit_law(self, tokens, tokens, (self.d_model, self.d_model))
        layer = self_attention(self, law, tokens, mean_spread(signal))
        mixed, squares = layer.forward(), layer.sum_square
        output = concatenated(
            self, signal, signal, mixed, squares, layer.mean_output, layer.weights
        )
        output.facts = layer.facts()
        output.notes = variance_notes(layer.wanted) + law.notes
        if not output.notes and layer.beyond_tables:
            output.notes = (BEYOND_TABLES,)

        def pullback(gradient: Gradient) -> Pulled:
            received = gradient.kernel
            gained = received.scaled(self._width * self.value)
            sides = layer.backward(gained)
            sent = sides.value + sides.cross
            sent = sent + through(sides.query, law.queries, law.spoken)
            sent = sent + through(sides.key, law.keys, law.spoken)

            def tilt() -> Kernel:
                return layer.tilt(gained)

            def weights() -> dict[str, Array]:
                paths = Paths(sides.query, sides.key, tilt())
                rows = of_rows(output, squares.shape)
                norms = projection_gradients(
                    self, law, signal, signal, mixed, received, paths, rows
                )
                table = layer.table_gradient(gained)
                return norms if table is None else norms | {"relative_bias": table}

            def response() -> Kernel:
                return layer.response().scaled(self._width * self.value)

            sent_back = Gradient(sent, gradient.seq_len)
            pulled = self._pulled(signal, sent_back, weights, law, tilt, response)
            return pulled._replace(attended=(layer, sides))

        return output, pullback

    # --- tokens alike --------------------------------------------------------------------------

    def _check_alike(self, length: int) -> None:
        """Raise where positions tell tokens apart."""
        if length == 1:
            return
        table = self.relative_bias
        placed = {
            "causal": self.causal,
            "rotary": self.rotary is not None,
            "alibi": bool(self.alibi),
            "relative_bias": table is not None and table.variance > 0.0,
            "window": self.window is not None and self.window < length,
        }
        for name, present in placed.items():
            if present:
                allowed = "absent where all tokens are alike"
                remedy = "resolve moments by token: tokens=True"
                raise domain_error(name, getattr(self, name), allowed, remedy)

    def _alike_by_laws(self, signal: Signal) -> tuple[Signal, Pullback]:
        found, mixed, back = attend_by_laws(self, signal)
        assert found.facts is not None
        squares = found.facts["square_sum"]
        # As in a narrow layer, where two heads of one key agree up to what their rows share.
        tokens = signal.second_moment()
        output = concatenated(
            self, signal, signal, mixed, squares, lambda: averaged(tokens, signal.seq_len)
        )
        output.kernel = _with_bias(self, found.kernel, squares)
        output.facts, output.notes = found.facts, found.notes
        law = logit_law(self, tokens, tokens, (self.d_model, self.d_model))

        def pullback(gradient: Gradient) -> Pulled:
            sent, query, key, tilt = back(gradient.kernel)

            def weights() -> dict[str, Array]:
                paths = Paths(query, key, tilt())
                return projection_gradients(
                    self, law, signal, signal, mixed, gradient.kernel, paths, of_rows(output)
                )

            def response() -> Kernel:
                return back(gradient.kernel.with_ones())[1]

            sent_back = Gradient(sent, gradient.seq_len)
            return self._pulled(signal, sent_back, weights, law, tilt, response)

        return output, pullback

    def _alike(self, signal: Signal) -> tuple[Signal, Pullback]:
        tokens, length = signal.second_moment(), signal.seq_len
        law = logit_law(self, tokens, tokens, (self.d_model, self.d_model))
        own = law.keys.kernel.diagonal - law.keys.kernel.pairs
        wanted = law.scale * law.queries.kernel.diagonal * own
        layer = AlikeAttention(
            law.queries.kernel,
            law.keys.kernel,
            tokens,
            query_count=length,
            key_count=length,
            scale=law.scale * np.minimum(1.0, THETA_PEAKED / np.maximum(wanted, 1e-300)),
            drop_prob=self.drop_prob,
            d_model=self.d_model,
            d_head=law.head_freedom,
            norm_spread=mean_spread(signal),
            value_bias=self.value_bias / positive(self.d_model * self.value),
        )
        mixed, squares = layer.forward, layer.sum_square
        output = concatenated(self, signal, signal, mixed, squares, lambda: layer.mean_output)
        output.facts = attention_facts(layer.logit_variance, squares, layer.entropy, float(length))
        output.notes = variance_notes(wanted) + law.notes

        def pullback(gradient: Gradient) -> Pulled:
            received = gradient.kernel
            paths = layer.backward(received.scaled(self._width * self.value))
            query = through(paths.query, law.queries, law.spoken)
            key = through(paths.key, law.keys, law.spoken)
            sent = paths.value + paths.cross + query + key

            def weights() -> dict[str, Array]:
                of = Paths(paths.query, paths.key, paths.tilt)
                return projection_gradients(
                    self, law, signal, signal, mixed, received, of, of_rows(output)
                )

            def response() -> Kernel:
                return layer.backward(received.with_ones().scaled(self._width * self.value)).query

            sent_back = Gradient(sent, gradient.seq_len)
            return self._pulled(signal, sent_back, weights, law, lambda: paths.tilt, response)

        return output, pullback

    # --- shared --------------------------------------------------------------------------------

    def _pulled(
        self,
        signal: Signal,
        sent: Gradient,
        weights: Callable[[], dict[str, Array]],
        law: LogitLaw,
        tilt: Callable[[], Kernel],
        response: Callable[[], Kernel],
    ) -> Pulled:
        return Pulled(
            sent,
            weights,
            lambda: overlap_gradients(self, law, signal, tilt()),
            lambda: through(response(), law.queries, law.spoken),
        )

    @property
    def _width(self) -> Any:
        return self.heads * self.d_head


def _with_bias(leaf: Any, heads: Kernel, squares: Array) -> Kernel:
    """The heads with the values' bias: rows of attention sum to 1, and dropped ones have
    second moment 1 + p/(1-p) sum a^2."""
    if not np.any(leaf.value_bias):
        return heads
    dropped = leaf.drop_prob / (1 - leaf.drop_prob)
    one, two = heads.lift(leaf.value_bias)
    diagonal = heads.diagonal + one * (1 + dropped * squares)
    return Kernel.joined(diagonal, heads.pairs + two, heads.resolved)


def concatenated(
    leaf: Any,
    signal: Signal,
    memory: Signal,
    mixed: Kernel,
    squares: Array,
    shared: Callable[[], Kernel],
    weights: Callable[[], Array] | None = None,
) -> Signal:
    """The concatenated heads of a `SelfAttention` or `CrossAttention`.

    Args:
        leaf: the attention.
        signal, memory: the tokens that ask, and those attended to.
        mixed: second moments per feature of sum_j a_ij y_j over the latter.
        squares: E sum_j a_ij^2.
        shared: gives the overlap of what two heads of one key and value mix.
        weights: gives mean attention; None: uniform, tokens alike.
    """
    width, gain = leaf.heads * leaf.d_head, leaf.memory_width * leaf.value
    heads = _with_bias(leaf, mixed.scaled(gain), squares)
    output = Signal(heads, signal.seq_len, mean=0.0 * heads.diagonal, width=width)
    if signal.spread is None:
        return output
    # Given the averaged tokens, entries are Gaussian: 2/width of the squared moment. Heads
    # with one key and value in common overlap besides, by what their rows share.
    output.spread = (heads * heads).scaled(2 / width)
    together = 1 if leaf.kv_heads is None else leaf.heads / leaf.kv_heads
    if together > 1:
        mean = shared().scaled(gain)
        output.spread += (mean * mean).scaled(2 * (together - 1) / width)
    row = None if weights is None else weights()
    found = averaged_overlaps(memory, row, gain)
    if found is not None and found.norms is not None:  # the averages' own vary too
        # Of another stack's tokens, those that ask are taken to know nothing; what the layers
        # before read of them, and thus have in common with this one, is left out.
        known = found.shared if memory is signal else (output.spread.scaled(0.0),) * 2
        output.realised = Realised(output.spread + found.overlaps, None, known)
        output.spread = output.spread + found.norms
    return output


__all__ = ["AttentionStatistics", "SelfAttention"]
