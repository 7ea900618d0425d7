"""Attention in torch: heads, positions, masks, biases and soft caps of the logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..model.positions import RelativeBias, Rotary
from ..model.transformer import Transformer
from .functions import dropout, normalise
from .parameters import ALL

MOST_LOGITS = 1 << 28
"""Largest number of logits computed at once, 1 GiB of float32; more are computed by groups of
heads."""

Project = Callable[[Tensor, str], Tensor]
"""Multiplies a tensor (batch, L, features) by the matrix of that name, and adds its bias."""

Shared = Callable[[Callable[[], tuple[Tensor, Tensor]]], tuple[Tensor, Tensor]]
"""Returns a layer's keys and values, from a function that computes the layer's own."""

Gains = Mapping[str, Tensor]
"""Learned gains of queries' and keys' norms, (d_head,) by "SIDE.norm.gain"."""


def self_attention(
    model: Transformer,
    number: int,
    x: Tensor,
    project: Project,
    table: Tensor | None,
    generator: torch.Generator,
    documents: Tensor | None = None,
    gains: Gains | None = None,
    value_norm: bool = False,
    mixed: Callable[[Tensor, Tensor], Tensor] = lambda x, value: value,
    shared: Shared = lambda make: make(),
) -> Tensor:
    """Concatenated heads (batch, L, heads * d_head) of layer `number`, counted from 1.

    `project` multiplies by "query", "key" or "value"; `table` is (buckets, heads) relative biases;
    `documents` (batch, L) are document numbers of packed rows; `value_norm` divides every head's
    values by their root mean square; `mixed` replaces the projected values of x; for `shared` see
    `Shared`.
    """
    if model.identity_attention:
        value = _split(project(x, "value"), model.d_head or 0)
        repeated = value.repeat_interleave(model.heads // value.shape[1], dim=1)
        return repeated.transpose(1, 2).flatten(-2)
    width, rotary = model.d_head or 0, model.rotaries[number - 1]

    def key_and_value() -> tuple[Tensor, Tensor]:
        key = _normalised(model, _split(project(x, "key"), width), "key", gains)
        value = _split(mixed(x, project(x, "value")), width)
        value = normalise(value, "rmsnorm", model.norm_epsilon) if value_norm else value
        return key, value

    query = _normalised(model, _split(project(x, "query"), width), "query", gains)
    key, value = shared(key_and_value)
    if model.placements[number - 1] == "hybrid":
        query, key, value = (
            normalise(part, model.normalization, model.norm_epsilon, dyt_alpha=model.dyt_alpha)
            for part in (query, key, value)
        )
    if rotary is not None:
        query, key = rotate(query, rotary), rotate(key, rotary)
    place = torch.arange(x.shape[1], device=x.device)
    offset = place - place[:, None]
    bias: Tensor | None = None
    if model.alibi:
        slopes = torch.tensor(alibi_slopes(model.heads), device=x.device, dtype=x.dtype)
        bias = -model.alibi * slopes[:, None, None] * offset.abs().to(x.dtype)
    if table is not None:
        assert model.relative_bias is not None
        learned = table[buckets(offset, model.relative_bias, model.causal)].permute(2, 0, 1)
        bias = learned if bias is None else bias + learned
    hidden = _hidden(model, number, offset, documents)
    sink = None if gains is None else gains.get("attention_sink")
    return _attend(model, number, query, key, value, bias, hidden, generator, sink)


def latent_attention(
    model: Transformer,
    number: int,
    query: Tensor,
    key: Tensor,
    shared: Tensor,
    value: Tensor,
    generator: torch.Generator,
    documents: Tensor | None = None,
) -> Tensor:
    """Concatenated heads of latent attention, (batch, L, heads * features).

    Queries, keys and values are (batch, L, heads * features). The keys of every head are extended
    by `shared`, (batch, L, features), which alone is rotary, as is the end of the queries.
    """
    heads = model.heads
    query, key, value = (_split(x, x.shape[-1] // heads) for x in (query, key, value))
    query, rotary_query = query.split([key.shape[-1], shared.shape[-1]], -1)
    rotary_key, rotary = shared[:, None], model.rotaries[number - 1]
    if rotary is not None:
        rotary_query, rotary_key = rotate(rotary_query, rotary), rotate(rotary_key, rotary)
    query = torch.cat([query, rotary_query], -1)
    key = torch.cat([key, rotary_key.expand(-1, heads, -1, -1)], -1)
    place = torch.arange(query.shape[2], device=query.device)
    hidden = _hidden(model, number, place - place[:, None], documents)
    return _attend(model, number, query, key, value, None, hidden, generator)


def cross_attention(
    model: Transformer,
    number: int,
    x: Tensor,
    memory: Tensor,
    project: Project,
    generator: torch.Generator,
    gains: Gains | None = None,
) -> Tensor:
    """Concatenated heads with keys and values of `memory` (batch, L', features), no mask and no
    positions; other arguments as for `self_attention`."""
    sources = (("cross_query", x), ("cross_key", memory), ("cross_value", memory))
    query, key, value = (
        _split(project(source, name), model.d_head or 0) for name, source in sources
    )
    query = _normalised(model, query, "cross_query", gains)
    key = _normalised(model, key, "cross_key", gains)
    return _attend(model, number, query, key, value, None, None, generator)


def _hidden(
    model: Transformer, number: int, offset: Tensor, documents: Tensor | None
) -> Tensor | None:
    """Mask of keys (columns) hidden from queries (rows), with documents; None: none is hidden."""
    hidden = hidden_from(offset, model.causal, model.windows[number - 1])
    if documents is None:
        return hidden
    other = (documents[:, :, None] != documents[:, None, :])[:, None]
    return other if hidden is None else hidden | other


def _attend(
    model: Transformer,
    number: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    hidden: Tensor | None,
    generator: torch.Generator,
    sink: Tensor | None = None,
) -> Tensor:
    """softmax(logits) value, concatenated; arguments are (batch, heads, tokens, d_head).

    `sink`: (heads,) logits of a key without a value.
    """
    sharing = query.shape[1] // key.shape[1]
    if sharing > 1:
        key, value = key.repeat_interleave(sharing, 1), value.repeat_interleave(sharing, 1)

    def mix(
        query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, sink: Tensor | None
    ) -> Tensor:
        """softmax(logits) value of some heads, (batch, heads, L, d_head)."""
        logits = query @ key.transpose(-1, -2)
        logits = logits / (math.sqrt(query.shape[-1]) * float(model.temperatures[number - 1]))
        if model.logit_softcap is not None:
            logits = model.logit_softcap * torch.tanh(logits / model.logit_softcap)
        if bias is not None:
            logits = logits + bias
        if hidden is not None:
            logits = logits.masked_fill(hidden, -math.inf)
        if sink is not None:
            column = sink[:, None, None].expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, column], -1)
        weights = logits.softmax(-1)[..., : key.shape[-2]]
        return dropout(weights, model.attention_dropout or 0.0, generator) @ value

    heads, logits = query.shape[1], query.shape[0] * query.shape[2] * key.shape[2]
    group = max(1, MOST_LOGITS // logits)
    if group >= heads:
        return mix(query, key, value, bias, sink).transpose(1, 2).flatten(-2)
    # Backward recomputes a group's weights, unless dropout drew a mask for them.
    recompute = torch.is_grad_enabled() and not model.attention_dropout
    groups = []
    for first in range(0, heads, group):
        some = slice(first, first + group)
        biases = (None if x is None else x[some] for x in (bias, sink))
        arguments = query[:, some], key[:, some], value[:, some], *biases
        if recompute:
            mixed = checkpoint(mix, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = mix(*arguments)
        groups.append(mixed)
    return torch.cat(groups, 1).transpose(1, 2).flatten(-2)


def _split(x: Tensor, d_head: int) -> Tensor:
    """(batch, L, heads * d_head) to (batch, heads, L, d_head)."""
    return x.unflatten(-1, (-1, d_head)).transpose(1, 2)


def _normalised(model: Transformer, x: Tensor, side: str, gains: Gains | None) -> Tensor:
    if model.qk_norm is None:
        return x
    gain = None if gains is None else gains.get(f"{side}.norm.gain")
    together = model.qk_norm.endswith(ALL)
    z = x.transpose(1, 2).flatten(-2) if together else x
    z = normalise(z, model.qk_norm.removesuffix(ALL), model.norm_epsilon)
    z = z if gain is None else z * gain
    return _split(z, model.d_head or 0) if together else z


# --- positions ------------------------------------------------------------------------------------


def hidden_from(offset: Tensor, causal: bool, window: int | None) -> Tensor | None:
    """Mask of keys (columns) hidden from queries (rows); `offset` is key minus query position.
    None: none is hidden."""
    hidden = offset > 0 if causal else None
    if window is not None:
        far = offset.abs() >= window
        hidden = far if hidden is None else hidden | far
    return hidden


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate features k and k + half of the rotary part by an angle: position *
    base^(-2k / part), position times one of the declared speeds, or the angle of a patch.

    Args:
        x: (..., L, d_head).
        rotary: the fraction of rotated features, the base or speeds, and the grid of patches.
    """
    half = int(x.shape[-1] * rotary.fraction) // 2
    if half == 0:
        return x
    speeds = rotary.base ** (-torch.arange(half, dtype=torch.float64) / half)
    if rotary.speeds is not None:
        speeds = torch.tensor(rotary.speeds, dtype=torch.float64)
    angle = torch.outer(torch.arange(x.shape[-2], dtype=torch.float64), speeds)
    if rotary.grid is not None:
        angle = _patch_angles(rotary, half, x.shape[-2])
    cos, sin = (f(angle).to(x.device, x.dtype) for f in (torch.cos, torch.sin))
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _patch_angles(rotary: Rotary, half: int, tokens: int) -> Tensor:
    """(L, half) angles: 2 pi base^(-2k / half) times the coordinates of a patch's centre."""
    assert rotary.grid is not None
    speeds = 2 * math.pi * rotary.base ** (-torch.arange(half // 2, dtype=torch.float64) * 2 / half)
    down, across = (
        2 * (torch.arange(side, dtype=torch.float64) + 0.5) / side - 1 for side in rotary.grid
    )
    rows = torch.outer(down, speeds)[:, None].expand(-1, len(across), -1)
    columns = torch.outer(across, speeds)[None].expand(len(down), -1, -1)
    angles = torch.cat([rows, columns], -1).flatten(0, 1)
    return torch.cat([angles.new_zeros(tokens - len(angles), half), angles])


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8 h / heads) for head h, counted from 1.

    If `heads` is no power of two: slopes of the power below, then every other slope of the power
    above, as in the released code of Press et al. 2022.
    """

    def geometric(count: int) -> list[float]:
        return [2.0 ** (-8.0 * head / count) for head in range(1, count + 1)]

    below = 1 << (heads.bit_length() - 1)
    return geometric(below) + geometric(2 * below)[::2][: heads - below]


def buckets(offset: Tensor, bias: RelativeBias, causal: bool) -> Tensor:
    """T5's bucket of every key minus query position.

    Half of a direction's buckets are for one distance each; the others divide the distances up to
    `max_distance` evenly on a logarithmic scale.
    """
    count = bias.buckets if causal else bias.buckets // 2
    first = torch.zeros_like(offset) if causal else (offset > 0) * count
    distance = (-offset).clamp(min=0) if causal else offset.abs()
    single = count // 2
    octaves = torch.log(distance.clamp(min=single).float() / single)
    share = octaves / math.log(bias.max_distance / single)
    wide = single + (share * (count - single)).long()
    return first + torch.where(distance < single, distance, wide.clamp(max=count - 1))
