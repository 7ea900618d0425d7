"""One draw of a declared model: a pass forward that keeps the stream, and one back by layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..model.embedding import Embedding
from ..model.patches import PatchEmbedding, SoundEmbedding
from ..model.transformer import Transformer
from ..prediction.draws import Draw, WeightGradient
from . import experts as _experts  # noqa: F401 (registers its twin)
from .collector import Collector, squared_norm
from .functions import activation, affine_norm, dropout, exchangeable_normal, generator
from .network import LayerTwin, Watch
from .output import draw_final, draw_head, run_final, run_head
from .parameters import affine, draw, draw_shared, draw_weights

_KEPT = 1 << 24
"""Numbers that the graphs of a draw hold, below which they are kept: 64 MB in float32."""


@dataclass(frozen=True)
class Input:
    """What enters a model: Gaussian tokens, or what its embedding reads.

    Attributes:
        signal: (variance, correlation) of Gaussian tokens.
        read: token ids (batch, L) or images (batch, channels, height, width); None: Gaussian.
        segment_ids: (batch, L); None: all of one segment.
        documents: (batch, L) numbers of packed rows, in runs; None: each row is one.
        joint: whether the weight gradients are those of the whole batch, else per sequence.
    """

    signal: tuple[float, float] = (1.0, 0.0)
    read: Tensor | None = None
    segment_ids: Tensor | None = None
    joint: bool = False
    documents: Tensor | None = None

    @property
    def last_of_document(self) -> Tensor:
        """(batch, L) whether the next token is of another document, or there is none."""
        assert self.documents is not None
        last = torch.ones_like(self.documents, dtype=torch.bool)
        last[:, :-1] = self.documents[:, 1:] != self.documents[:, :-1]
        return last

    @property
    def segments(self) -> int:
        """Rows that the segment table needs."""
        return 1 if self.segment_ids is None else int(self.segment_ids.max()) + 1


@dataclass(frozen=True)
class Twin:
    """The declared model with everything a draw needs but its random numbers.

    Attributes:
        model: the declaration.
        input: of the model.
        batch: sequences.
        device, dtype: of every tensor.
        gradient: (variance, correlation) of the Gaussian gradient at the last layer's output; None:
            that of the loss, or, of an encoder, what the decoder returns.
        targets: of the loss; see `moments.simulation.output.run_head`.
        encoder: what the model's cross-attention reads; None: there is no cross-attention.
        stream: of random numbers: an encoder's differs from its decoder's.
    """

    model: Transformer
    input: Input
    batch: int
    device: Any
    dtype: Any
    gradient: tuple[float, float] | None = None
    targets: Tensor | None = None
    encoder: Twin | None = None
    stream: tuple[int, ...] = ()

    def run(self, seed: int, draw: int) -> Draw:
        """One forward and backward pass under the weights of draw number `draw`."""
        if self.encoder is None:
            decoder = _Pass(self, seed, draw)
            decoder.backward(decoder.finish(decoder.forward()))
            return decoder.result()
        read = _Pass(self.encoder, seed, draw)
        decoder = _Pass(self, seed, draw, read.offer(read.forward()))
        decoder.backward(decoder.finish(decoder.forward()))
        read.backward(read.returned(decoder.memory_gradient))
        return decoder.result(read.result())

    @property
    def numbers(self) -> int:
        """About how many a draw's graphs hold: a layer's matrices, what passes them, the logits."""
        model = self.model
        widths = 16 * model.d_model + 6 * (model.d_ff or 0) + 4 * model.heads * model.seq_len
        matrices = model.d_model * (4 * model.d_model + 3 * (model.d_ff or 0))
        return model.layers * (self.batch * model.seq_len * widths + matrices)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(batch, L, d_model)."""
        return self.batch, self.model.seq_len, self.model.d_model


@dataclass
class _Pass:
    """A twin under the weights of one draw.

    A small model keeps its layers' graphs. Of another, peak memory is one layer's graph and N + 1
    stream tensors: the backward pass draws each layer's weights and masks again from that layer's
    own stream of random numbers. Stream 0 is the input's,
    n is layer n's, N + 1 the injected gradient's, N + 2 that of parameters which layers share, and
    N + 3 that of what follows the last layer.
    """

    twin: Twin
    seed: int
    draw: int
    memory: Tensor | None = None
    seen: Collector = field(init=False)
    loss: float | None = None
    logit_variance: float | None = None

    def __post_init__(self) -> None:
        twin = self.twin
        self.layers = twin.model.layers
        self.seen = Collector(twin.input.documents)
        self.shared = draw_shared(twin.model, self.random(self.layers + 2), twin.dtype)
        self.shared_gradient = [torch.zeros_like(leaf) for leaf in self.shared.values()]
        self.entering: list[Tensor] = []
        self.graphs: list[tuple[Tensor, dict[str, Tensor], dict[Any, Tensor]]] = []
        self.norms: list[tuple[WeightGradient, float]] = []
        self.tied_gradient: Tensor | None = None
        self.kept: dict[Any, Tensor] = {}
        self.kept_gradient: dict[Any, Tensor] = {}
        if self.memory is not None:
            self.memory = self.memory.detach().requires_grad_()
            self.memory_gradient = torch.zeros_like(self.memory)

    def random(self, part: int) -> torch.Generator:
        """The stream of random numbers of one part of the model, from its beginning."""
        return generator(self.twin.device, self.seed, self.draw, part, *self.twin.stream)

    def forward(self) -> Tensor:
        """The last layer's output; what enters each layer is kept."""
        keep = self.twin.numbers < _KEPT
        with torch.no_grad():
            x = self._enter()[0]
        again = {0} if self.twin.model.per_layer_embedding is not None else set()
        again |= {point for _, added in self.twin.model.additions for point in added}
        self._keep({0: x} if 0 in again else {})
        for n in range(1, self.layers + 1):
            self.entering.append(x.detach().requires_grad_(keep))
            with torch.set_grad_enabled(keep):
                leaving = self._layer(n, self.entering[-1], self.seen if keep else None)
            if keep:
                self.graphs.append(leaving)
            x = leaving[0]
            self._keep(leaving[2] | ({n: x} if n in again else {}))
        return x.detach()

    def _keep(self, made: Mapping[Any, Tensor]) -> None:
        """What later layers read, as leaves whose gradients add up."""
        for name, one in made.items():
            self.kept[name] = one.detach().requires_grad_()
            self.kept_gradient[name] = torch.zeros_like(one)

    def finish(self, x: Tensor) -> Tensor:
        """Run the head on the last layer's output; the gradient there."""
        twin, model = self.twin, self.twin.model
        if model.head is not None:
            x = x.detach().requires_grad_()
            random = self.random(self.layers + 3)
            drawn = draw_head(model, random, twin.dtype)
            # The same stream of random numbers gives the same table as the input reads.
            tied = {"token": self._embedding(self.random(0))["token"]} if model.head.tied else {}
            watch = _watcher(self.seen, self.layers + 1)
            logits, loss = run_head(model, x, twin.targets, {**drawn, **tied}, random, watch)
            self.logit_variance = squared_norm(logits) / logits.numel()
            if loss is not None:
                self.loss = float(loss.detach())
            if loss is not None and twin.gradient is None:
                leaves = drawn | tied
                received, *pulled = torch.autograd.grad(loss, [x, *leaves.values()])
                self.tied_gradient = pulled.pop() if tied else None
                self._note(self.layers + 1, drawn, pulled)
                return received
        assert twin.gradient is not None
        random = self.random(self.layers + 1)
        return exchangeable_normal(twin.shape, *twin.gradient, random, twin.dtype)

    def offer(self, x: Tensor) -> Tensor:
        """What a decoder reads: the last layer's output, normalised where nothing else did it."""
        twin = self.twin
        random = self.random(self.layers + 3)
        self._last = x.detach().requires_grad_()
        self._final = draw_final(twin.model, twin.device, twin.dtype)
        watch = _watcher(self.seen, self.layers + 1)
        self._offered = run_final(twin.model, self._last, self._final, random, watch)
        return self._offered

    def returned(self, gradient: Tensor) -> Tensor:
        """The gradient at an encoder's last layer, from that at what it offered."""
        ends = [self._last, *self._final.values()]
        received, *pulled = torch.autograd.grad(self._offered, ends, gradient)
        self._note(self.layers + 1, self._final, pulled)
        return received

    def backward(self, received: Tensor) -> None:
        """Carry a gradient at the last layer's output back to the input, layer by layer.

        Of weights that all layers share, a layer's norm is what its part of their gradient has
        along the whole.
        """
        together = self.twin.model.shared_layers
        parts: list[tuple[int, dict[str, Tensor], list[Tensor]]] = []
        for n in range(self.layers, 0, -1):
            entering = self.entering.pop().requires_grad_()
            kept = self.graphs.pop() if self.graphs else None
            leaving, weights, made = kept or self._layer(n, entering, self.seen)
            received = received + self.kept_gradient.pop(n, 0.0)
            starts, arriving = [leaving, *made.values()], [received]
            arriving += [self.kept_gradient.pop(name) for name in made]
            ends = [entering, *self.shared.values(), *weights.values()]
            ends += [] if self.memory is None else [self.memory]
            earlier = list(self.kept_gradient)
            ends += [self.kept[name] for name in earlier]
            # a block in attention's place need not read all biases that are declared
            back = torch.autograd.grad(starts, ends, arriving, allow_unused=True)
            received, *pulled = (
                torch.zeros_like(end) if one is None else one
                for one, end in zip(back, ends, strict=True)
            )
            for name in reversed(earlier):
                self.kept_gradient[name] += pulled.pop()
            if self.memory is not None:
                self.memory_gradient += pulled.pop()
            for total, added in zip(self.shared_gradient, pulled, strict=False):
                total += added
            if together:
                parts.append((n, weights, pulled))
            else:
                self._note(n, self.shared | weights, pulled)
        wholes = [sum(each) for each in zip(*(pulled for *_, pulled in parts), strict=True)]
        for n, weights, pulled in parts:
            self._note(n, weights, pulled, wholes)
        self._note(0, self.shared, self.shared_gradient)
        leaving, leaves = self._enter(self.seen)
        received = received + self.kept_gradient.pop(0, 0.0)
        pulled = torch.autograd.grad(leaving, list(leaves.values()), received)
        found = {} if self.twin.input.read is None else dict(zip(leaves, pulled, strict=True))
        if self.tied_gradient is not None:
            found["token"] = found.get("token", 0) + self.tied_gradient
        self._note(0, found, list(found.values()))

    def result(self, encoder: Draw | None = None) -> Draw:
        """What was measured of the model and of its encoder."""
        return Draw(
            self.seen.signal,
            self.seen.gradient,
            dict(self.norms),
            self.loss,
            self.logit_variance,
            encoder,
        )

    def _embedding(self, random: torch.Generator) -> dict[str, Tensor]:
        return draw_embedding(self.twin.model, self.twin.input.segments, random, self.twin.dtype)

    def _enter(self, seen: Collector | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The tensor that enters layer 1, and the leaves it was made of."""
        twin, given = self.twin, self.twin.input
        random, watch = self.random(0), _watcher(seen, 0)
        if given.read is None:
            x = exchangeable_normal(twin.shape, *given.signal, random, twin.dtype)
            return watch(x.requires_grad_().clone(), "stream"), {"input": x}
        weights = self._embedding(random)
        x = run_embedding(
            twin.model, given.read, given.segment_ids, weights, random, watch, given.documents
        )
        return watch(x, "stream"), weights

    def _layer(
        self, number: int, x: Tensor, seen: Collector | None = None
    ) -> tuple[Tensor, dict[str, Tensor], dict[Any, Tensor]]:
        """The tensor that leaves a layer, the layer's weights, and what later layers read of it."""
        twin, random = self.twin, self.random(number)
        of_weights = self.random(self.layers + 4) if twin.model.shared_layers else random
        weights = draw_weights(twin.model, number, of_weights, twin.dtype)
        every, watch = {**weights, **self.shared}, _watcher(seen, number)
        of = (self.memory, twin.input.documents, self.kept)
        layer = LayerTwin(twin.model, number, every, random, watch, *of, read=twin.input.read)
        return layer.run(x), weights, layer.made

    def _note(
        self,
        layer: int,
        leaves: Mapping[str, Tensor],
        gradients: Sequence[Tensor],
        wholes: Sequence[Tensor] | None = None,
    ) -> None:
        """Squared norms of gradients, or what they have along `wholes`."""
        # Independent sequences receive independent gradients, so their squared norms add up.
        over = 1 if self.twin.input.joint else self.twin.batch
        if wholes is None:
            products = [squared_norm(gradient) for gradient in gradients]
        else:
            pairs = zip(gradients, wholes, strict=True)
            products = [float((one.double() * whole.double()).sum()) for one, whole in pairs]
        self.norms[:0] = [
            (WeightGradient(layer, name, name), product / over)
            for name, product in zip(leaves, products, strict=True)
        ]


def _watcher(seen: Collector | None, layer: int) -> Watch:
    if seen is None:
        return lambda x, site: x
    return lambda x, site: seen.watch(x, [(layer, site)])


# --- what enters layer 1: tables looked up or patches projected -----------------------------------


def draw_embedding(
    model: Transformer, segments: int, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Parameters of the model's embedding that require gradients, on the generator's device; tables
    are (rows, d_model), the segment table's `segments`."""
    embedding, d_model = model.embedding, model.d_model
    drawn: dict[str, Tensor] = {}
    if isinstance(embedding, SoundEmbedding):
        for number, kernel in enumerate(embedding.kernels, 1):
            taps = (d_model, d_model if number > 1 else embedding.bins, kernel)
            name = f"convolution_{number}"
            drawn[name] = draw(taps, embedding.variance, generator, dtype)
            if embedding.bias_variance is not None:
                bias = draw((d_model,), embedding.bias_variance, generator, dtype)
                drawn[f"{name}.bias"] = bias
        return drawn
    if isinstance(embedding, PatchEmbedding):
        shape = (embedding.patch_width, d_model)
        drawn["patch"] = draw(shape, embedding.patch_variance, generator, dtype)
        if embedding.bias_variance is not None:
            drawn["patch.bias"] = draw((d_model,), embedding.bias_variance, generator, dtype)
        if embedding.class_token:
            drawn["class"] = draw((d_model,), embedding.class_variance, generator, dtype)
        tables: dict[str, tuple[int, float]] = {}
        if embedding.placed == "learned":
            tables["position"] = model.seq_len, embedding.position_variance
        if embedding.registers:
            tables["register"] = embedding.registers, embedding.register_variance
    else:
        tables = {
            "token": (embedding.vocab_size, embedding.token_variance),
            "position": (model.seq_len, embedding.position_variance),
            "segment": (segments, embedding.segment_variance),
        }
    factor: int | None = getattr(embedding, "factor_dim", None)
    for name, (rows, variance) in tables.items():
        if variance > 0 or isinstance(embedding, PatchEmbedding):  # whose tables may start at zero
            narrow = embedding.norm or name == "token"
            width = factor if factor is not None and narrow else d_model
            drawn[name] = draw((rows, width), variance, generator, dtype)
    if factor is not None:
        drawn["factor"] = draw((factor, d_model), embedding.factor_variance, generator, dtype)
        if embedding.factor_bias:
            drawn["factor.bias"] = draw((d_model,), 0.0, generator, dtype)
    if isinstance(embedding, Embedding) and embedding.padding_id is not None:
        with torch.no_grad():
            drawn["token"][embedding.padding_id] = 0
    if embedding.norm:
        width = d_model if factor is None else factor
        drawn |= affine(model, "embedding.norm", 1.0, generator.device, dtype, width)
    return drawn


def run_embedding(
    model: Transformer,
    read: Tensor,
    segment_ids: Tensor | None,
    weights: Mapping[str, Tensor],
    generator: torch.Generator,
    watch: Watch,
    documents: Tensor | None = None,
) -> Tensor:
    """The tensor that enters layer 1, (batch, L, d_model), by the weights of `draw_embedding`.

    `read`, `segment_ids` and `documents` are as in `Input`; positions restart with each document.
    """
    place = None if documents is None else within(documents)
    embedding = model.embedding
    if isinstance(embedding, PatchEmbedding):
        x = _patches(embedding, read, weights)
    elif isinstance(embedding, SoundEmbedding):
        x = _convolutions(embedding, read, weights)
    else:
        x = functional.embedding(read, weights["token"], padding_idx=embedding.padding_id)
        x = x * embedding.scale if embedding.scale != 1 else x
        if embedding.factor_dim is not None and not embedding.norm:
            x = x @ weights["factor"]
        if embedding.positions == "sinusoidal":
            table = sinusoids(model.seq_len, model.d_model, embedding.position_base)
            table = table.to(x.device, x.dtype)
            x = x + (table if place is None else table[place])
        if "segment" in weights:
            ids = torch.zeros_like(read) if segment_ids is None else segment_ids
            x = x + weights["segment"][ids]
    if "position" in weights:
        table = weights["position"]
        x = x + (table if place is None else table[place])
    x = watch(x, "embedding.sum")
    if embedding.norm:
        site = "embedding.norm"
        x = affine_norm(model, x, weights, site, epsilon=embedding.norm_epsilon)
        x = watch(x, site)
    x = watch(dropout(x, embedding.dropout, generator), "embedding")
    if embedding.norm and "factor" in weights:
        x = x @ weights["factor"]
        if "factor.bias" in weights:
            x = x + weights["factor.bias"]
        x = watch(x, "embedding.factor")
    return x


def within(documents: Tensor) -> Tensor:
    """(batch, L) how many tokens of its document stand before each token."""
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril(-1).sum(-1)


def sinusoids(seq_len: int, d_model: int, base: float = 10000.0) -> Tensor:
    """sin and cos of position / base^(2k/d_model) in features 2k and 2k + 1, (L, d_model)."""
    features = torch.arange(d_model)
    rate = base ** (-(features - features % 2).double() / d_model)
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float64), rate)
    return torch.where(features % 2 == 0, angle.sin(), angle.cos())


def _convolutions(
    embedding: SoundEmbedding, pixels: Tensor, weights: Mapping[str, Tensor]
) -> Tensor:
    x = pixels[:, 0]
    for number, (kernel, stride) in enumerate(
        zip(embedding.kernels, embedding.strides, strict=True), 1
    ):
        name = f"convolution_{number}"
        bias, padding = weights.get(f"{name}.bias"), kernel // 2
        x = functional.conv1d(x, weights[name], bias, stride, padding)
        x = activation(embedding.activation)(x)
    x = x.transpose(1, 2)
    if embedding.positions == "sinusoidal":
        half = x.shape[-1] // 2
        speeds = 10000.0 ** (-torch.arange(half).double() / max(half - 1, 1))
        angles = torch.outer(torch.arange(x.shape[1]).double(), speeds)
        x = x + torch.cat([angles.sin(), angles.cos()], 1).to(x)
    return x


def _patches(embedding: PatchEmbedding, pixels: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    # unfold gives (batch, channels * size * size, patches), row by row.
    cut = functional.unfold(pixels, embedding.patch_size, stride=embedding.strides)
    x = cut.transpose(1, 2) @ weights["patch"]
    if "patch.bias" in weights:
        x = x + weights["patch.bias"]
    if embedding.placed == "sinusoidal":
        halves = [sinusoids(side, x.shape[-1] // 2).to(x) for side in embedding.grid]
        down, across = (torch.tensor(p).flatten() for p in np.indices(embedding.grid))
        x = x + torch.cat([halves[0][down], halves[1][across]], 1)
    for name in ("register", "class"):
        if name in weights:
            row = weights[name].reshape(-1, x.shape[-1])
            x = torch.cat([row.expand(len(x), *row.shape), x], 1)
    return x
