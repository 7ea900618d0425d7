"""One draw of a declared model: a forward pass that stores the stream, and a layerwise backward."""

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

STORED_GRAPHS = 1 << 24
"""Number of floats up to which a draw stores the graphs of all layers: 64 MB in float32."""


@dataclass(frozen=True)
class Input:
    """The input of a model: Gaussian tokens, or token ids or images for its embedding.

    Attributes:
        signal: (variance, correlation) of Gaussian tokens.
        read: token ids (batch, L) or images (batch, channels, height, width); None: Gaussian.
        segment_ids: (batch, L); None: a single segment.
        documents: (batch, L) document numbers of packed rows, in runs; None: one document per row.
        joint: whether weight gradients are of the whole batch, else per sequence.
    """

    signal: tuple[float, float] = (1.0, 0.0)
    read: Tensor | None = None
    segment_ids: Tensor | None = None
    joint: bool = False
    documents: Tensor | None = None

    @property
    def last_of_document(self) -> Tensor:
        """(batch, L) whether a token is the last of its document."""
        assert self.documents is not None
        last = torch.ones_like(self.documents, dtype=torch.bool)
        last[:, :-1] = self.documents[:, 1:] != self.documents[:, :-1]
        return last

    @property
    def segments(self) -> int:
        """Number of rows of the segment table."""
        return 1 if self.segment_ids is None else int(self.segment_ids.max()) + 1


@dataclass(frozen=True)
class Twin:
    """The declared model and all arguments of a draw but the seed.

    Attributes:
        model, input: the declaration and its input.
        batch: number of sequences.
        device, dtype: of every tensor.
        gradient: (variance, correlation) of the Gaussian gradient at the last layer's output; None:
            the gradient of the loss, or for an encoder that from the decoder.
        targets: targets of the loss; see `moments.simulation.output.run_head`.
        encoder: the twin of the encoder; None: there is no cross-attention.
        stream: key of the random numbers, different for encoder and decoder.
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
        encoder = _Pass(self.encoder, seed, draw)
        decoder = _Pass(self, seed, draw, encoder.encode(encoder.forward()))
        decoder.backward(decoder.finish(decoder.forward()))
        encoder.backward(encoder.through_encode(decoder.memory_gradient))
        return decoder.result(encoder.result())

    @property
    def numbers(self) -> int:
        """Rough number of floats in the graphs of all layers: matrices, activations and logits."""
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
    """A forward and backward pass of a twin under the weights of one draw.

    A small model stores its layers' graphs. For a larger one peak memory is one layer's graph and
    N + 1 stream tensors: the backward pass draws each layer's weights and masks again from that
    layer's stream of random numbers. Streams: 0 for the input, n for layer n, N + 1 for the
    injected gradient, N + 2 for parameters that layers share, N + 3 for the parts behind the last
    layer, N + 4 for all layers' weights if they are shared.
    """

    twin: Twin
    seed: int
    draw: int
    memory: Tensor | None = None
    collector: Collector = field(init=False)
    loss: float | None = None
    logit_variance: float | None = None

    def __post_init__(self) -> None:
        twin = self.twin
        self.layers = twin.model.layers
        self.collector = Collector(twin.input.documents)
        self.shared = draw_shared(twin.model, self.random(self.layers + 2), twin.dtype)
        self.shared_gradient = [torch.zeros_like(leaf) for leaf in self.shared.values()]
        self.inputs: list[Tensor] = []
        self.graphs: list[tuple[Tensor, dict[str, Tensor], dict[Any, Tensor]]] = []
        self.norms: list[tuple[WeightGradient, float]] = []
        self.tied_gradient: Tensor | None = None
        self.sources: dict[Any, Tensor] = {}
        self.source_gradients: dict[Any, Tensor] = {}
        if self.memory is not None:
            self.memory = self.memory.detach().requires_grad_()
            self.memory_gradient = torch.zeros_like(self.memory)

    def random(self, part: int) -> torch.Generator:
        """A new generator of the random numbers of one part of the model."""
        return generator(self.twin.device, self.seed, self.draw, part, *self.twin.stream)

    def forward(self) -> Tensor:
        """The last layer's output; stores every layer's input."""
        store = self.twin.numbers < STORED_GRAPHS
        with torch.no_grad():
            x = self._input()[0]
        read_later = {0} if self.twin.model.per_layer_embedding is not None else set()
        read_later |= {point for _, added in self.twin.model.additions for point in added}
        self._add_sources({0: x} if 0 in read_later else {})
        for n in range(1, self.layers + 1):
            self.inputs.append(x.detach().requires_grad_(store))
            with torch.set_grad_enabled(store):
                graph = self._layer(n, self.inputs[-1], self.collector if store else None)
            if store:
                self.graphs.append(graph)
            x, _, exports = graph
            self._add_sources(exports | ({n: x} if n in read_later else {}))
        return x.detach()

    def _add_sources(self, tensors: Mapping[Any, Tensor]) -> None:
        """Store tensors that later layers read, as leaves whose gradients are accumulated."""
        for name, tensor in tensors.items():
            self.sources[name] = tensor.detach().requires_grad_()
            self.source_gradients[name] = torch.zeros_like(tensor)

    def finish(self, x: Tensor) -> Tensor:
        """Run the head on the last layer's output, and return the gradient there."""
        twin, model = self.twin, self.twin.model
        if model.head is not None:
            x = x.detach().requires_grad_()
            random = self.random(self.layers + 3)
            drawn = draw_head(model, random, twin.dtype)
            # The same random numbers give the table of the input.
            tied = {"token": self._embedding(self.random(0))["token"]} if model.head.tied else {}
            watch = _watcher(self.collector, self.layers + 1)
            logits, loss = run_head(model, x, twin.targets, {**drawn, **tied}, random, watch)
            self.logit_variance = squared_norm(logits) / logits.numel()
            if loss is not None:
                self.loss = float(loss.detach())
            if loss is not None and twin.gradient is None:
                leaves = drawn | tied
                gradient, *gradients = torch.autograd.grad(loss, [x, *leaves.values()])
                self.tied_gradient = gradients.pop() if tied else None
                self._record(self.layers + 1, drawn, gradients)
                return gradient
        assert twin.gradient is not None
        random = self.random(self.layers + 1)
        return exchangeable_normal(twin.shape, *twin.gradient, random, twin.dtype)

    def encode(self, x: Tensor) -> Tensor:
        """A decoder's memory: an encoder's last output behind its final norm, if it has one."""
        twin = self.twin
        random = self.random(self.layers + 3)
        self._last = x.detach().requires_grad_()
        self._final = draw_final(twin.model, twin.device, twin.dtype)
        watch = _watcher(self.collector, self.layers + 1)
        self._memory = run_final(twin.model, self._last, self._final, random, watch)
        return self._memory

    def through_encode(self, gradient: Tensor) -> Tensor:
        """The gradient at an encoder's last layer, from that at the decoder's memory."""
        leaves = [self._last, *self._final.values()]
        gradient, *gradients = torch.autograd.grad(self._memory, leaves, gradient)
        self._record(self.layers + 1, self._final, gradients)
        return gradient

    def backward(self, gradient: Tensor) -> None:
        """Backpropagate from the last layer's output to the input, layer by layer.

        For weights that all layers share, a layer's squared norm is the inner product of its share
        of their gradient with the whole gradient.
        """
        layer_shares: list[tuple[int, dict[str, Tensor], list[Tensor]]] = []
        for n in range(self.layers, 0, -1):
            x = self.inputs.pop().requires_grad_()
            stored = self.graphs.pop() if self.graphs else None
            y, weights, exports = stored or self._layer(n, x, self.collector)
            outputs = [y, *exports.values()]
            output_gradients = [gradient + self.source_gradients.pop(n, 0.0)]
            output_gradients += [self.source_gradients.pop(name) for name in exports]
            leaves = [x, *self.shared.values(), *weights.values()]
            leaves += [] if self.memory is None else [self.memory]
            earlier = list(self.source_gradients)
            leaves += [self.sources[name] for name in earlier]
            # A registered block need not use every declared bias.
            computed = torch.autograd.grad(outputs, leaves, output_gradients, allow_unused=True)
            gradient, *shares = (
                torch.zeros_like(leaf) if entry is None else entry
                for entry, leaf in zip(computed, leaves, strict=True)
            )
            for name in reversed(earlier):
                self.source_gradients[name] += shares.pop()
            if self.memory is not None:
                self.memory_gradient += shares.pop()
            for total, share in zip(self.shared_gradient, shares, strict=False):
                total += share
            if self.twin.model.shared_layers:
                layer_shares.append((n, weights, shares))
            else:
                self._record(n, self.shared | weights, shares)
        wholes = [
            sum(parts) for parts in zip(*(shares for *_, shares in layer_shares), strict=True)
        ]
        for n, weights, shares in layer_shares:
            self._record(n, weights, shares, wholes)
        self._record(0, self.shared, self.shared_gradient)
        x, parameters = self._input(self.collector)
        gradient = gradient + self.source_gradients.pop(0, 0.0)
        computed = torch.autograd.grad(x, list(parameters.values()), gradient)
        embedded = self.twin.input.read is not None
        gradients = dict(zip(parameters, computed, strict=True)) if embedded else {}
        if self.tied_gradient is not None:
            gradients["token"] = gradients.get("token", 0) + self.tied_gradient
        self._record(0, gradients, list(gradients.values()))

    def result(self, encoder: Draw | None = None) -> Draw:
        """The measurements, with those of the encoder."""
        return Draw(
            self.collector.signal,
            self.collector.gradient,
            dict(self.norms),
            self.loss,
            self.logit_variance,
            encoder,
        )

    def _embedding(self, random: torch.Generator) -> dict[str, Tensor]:
        return draw_embedding(self.twin.model, self.twin.input.segments, random, self.twin.dtype)

    def _input(self, collector: Collector | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Layer 1's input, and its leaves: the Gaussian tensor or the embedding's parameters."""
        twin, source = self.twin, self.twin.input
        random, watch = self.random(0), _watcher(collector, 0)
        if source.read is None:
            x = exchangeable_normal(twin.shape, *source.signal, random, twin.dtype)
            return watch(x.requires_grad_().clone(), "stream"), {"input": x}
        weights = self._embedding(random)
        x = run_embedding(
            twin.model, source.read, source.segment_ids, weights, random, watch, source.documents
        )
        return watch(x, "stream"), weights

    def _layer(
        self, number: int, x: Tensor, collector: Collector | None = None
    ) -> tuple[Tensor, dict[str, Tensor], dict[Any, Tensor]]:
        """A layer's output, its weights, and its other tensors that later layers read."""
        twin, random = self.twin, self.random(number)
        weight_random = self.random(self.layers + 4) if twin.model.shared_layers else random
        weights = draw_weights(twin.model, number, weight_random, twin.dtype)
        layer = LayerTwin(
            twin.model,
            number,
            {**weights, **self.shared},
            random,
            _watcher(collector, number),
            self.memory,
            twin.input.documents,
            self.sources,
            read=twin.input.read,
        )
        return layer.run(x), weights, layer.exports

    def _record(
        self,
        layer: int,
        leaves: Mapping[str, Tensor],
        gradients: Sequence[Tensor],
        wholes: Sequence[Tensor] | None = None,
    ) -> None:
        """Record squared norms of gradients, or inner products with `wholes`, per sequence."""
        # Independent sequences receive independent gradients, so their squared norms add up.
        over = 1 if self.twin.input.joint else self.twin.batch
        if wholes is None:
            products = [squared_norm(gradient) for gradient in gradients]
        else:
            pairs = zip(gradients, wholes, strict=True)
            products = [float((share.double() * whole.double()).sum()) for share, whole in pairs]
        self.norms[:0] = [
            (WeightGradient(layer, name, name), product / over)
            for name, product in zip(leaves, products, strict=True)
        ]


def _watcher(collector: Collector | None, layer: int) -> Watch:
    if collector is None:
        return lambda x, site: x
    return lambda x, site: collector.watch(x, [(layer, site)])


# --- embeddings: tables and patches ---------------------------------------------------------------


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
        if variance > 0 or isinstance(embedding, PatchEmbedding):  # its tables may start at zero
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
    """Layer 1's input, (batch, L, d_model), with the weights of `draw_embedding`.

    `read`, `segment_ids` and `documents` are as in `Input`; positions restart with each document.
    """
    place = None if documents is None else positions_in(documents)
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


def positions_in(documents: Tensor) -> Tensor:
    """(batch, L) position of every token in its document, from 0."""
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
    patches = functional.unfold(pixels, embedding.patch_size, stride=embedding.strides)
    x = patches.transpose(1, 2) @ weights["patch"]
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
