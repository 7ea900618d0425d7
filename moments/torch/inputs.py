"""Random input for a module: the names of forward's arguments say of what kind, the config and the
first layers of what size."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 12
"""Tokens of random sequences; longer distances are not tested."""

SAMPLES, FEW_SAMPLES = 6720, 1280
"""Samples of a sound: 21 frames of 320, which the usual strides divide; and with channels, as for
codecs, which need no more than one frame."""

SIDES = (48, 64, 224)
"""Heights of pictures if the config says none."""

BINS = (128, 80)
"""Bins of spectra if the config says none."""

ATTEMPTS = 16
"""Combinations tried for one set of arguments."""

CUT = ("grid_thw", "image_grid_thw", "spatial_shapes", "pixel_position_ids")
"""Arguments of modules that read pictures as rows of patches."""

MORE = (
    "input_ids",
    "pixel_values",
    "pixel_values_videos",
    "input_features",
    "input_values",
    "bbox",
    "input_features_mask",
    "visual_feats",
    "visual_pos",
    "actions",
    "rewards",
    "returns_to_go",
    "timesteps",
    "decoder_input_ids",
    "encoder_hidden_states",
)
"""Arguments that a module may need although their default is None."""


def examples(module: nn.Module) -> Iterator[Any]:
    """Inputs that a module may take, likeliest first."""
    generator = torch.Generator().manual_seed(0)
    if hasattr(getattr(module, "config", None), "to_dict"):
        yield from _Configured(module, generator).batches()
    yield from _by_weights(module, generator)


def of_one_row(example: Any) -> Any:
    """The first sequence or picture of an example; all of it if its rows are no sequences."""
    tensors = list(example.values()) if isinstance(example, dict) else [example]
    if any(len(tensor) != 2 for tensor in tensors):
        return example
    return {n: v[:1] for n, v in example.items()} if isinstance(example, dict) else example[:1]


def vocabulary(config: Any) -> int | None:
    """Rows of the table of text tokens of a Hugging Face module."""
    if not hasattr(config, "to_dict"):
        return None
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    rows = getattr(inner, "vocab_size", getattr(config, "vocab_size", None))
    return rows if isinstance(rows, int) and rows > 0 else None


def _ids(rows: int, generator: torch.Generator, length: int = TOKENS) -> Tensor:
    low = min(5, rows // 2)  # special tokens are the first ones
    return torch.randint(low, rows, (2, length), generator=generator)


def _dtype(module: nn.Module) -> torch.dtype:
    floats = (p.dtype for p in module.parameters() if p.is_floating_point())
    return next(floats, torch.float32)


def _by_weights(module: nn.Module, generator: torch.Generator) -> Iterator[Any]:
    """Inputs by the shapes of tables and matrices alone."""
    dtype = _dtype(module)

    def named(*tensors: Tensor) -> dict[str, Tensor]:
        arguments = inspect.signature(module.forward).parameters.values()
        names = [a.name for a in arguments if a.kind is a.POSITIONAL_OR_KEYWORD]
        return dict(zip(names, tensors, strict=False))

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    tables = [p.num_embeddings for p in module.modules() if isinstance(p, nn.Embedding)]
    tables += [len(p) for p in module.parameters() if p.ndim == 2][:1]
    for rows in sorted(set(tables), reverse=True)[:2]:
        length = min([TOKENS, *(n for n in tables if n > 3)])
        yield _ids(rows, generator, length)
        yield named(_ids(rows, generator, length), _ids(rows, generator, length))
    widths = [p.embed_dim for p in module.modules() if isinstance(p, nn.MultiheadAttention)]
    widths += [p.in_features for p in module.modules() if isinstance(p, nn.Linear)]
    widths += [p.shape[-1] for p in module.parameters() if p.ndim == 1]
    for width in widths[:1]:
        features = drawn(2, TOKENS, width)
        if isinstance(module, nn.Transformer | nn.TransformerDecoder):
            yield named(features, drawn(2, TOKENS, width))
        yield features
    convolution = next((p for p in module.modules() if isinstance(p, nn.Conv2d)), None)
    if convolution is not None:
        sizes = [getattr(p, "img_size", None) for p in module.modules()]
        sizes += [getattr(p, "image_size", None) for p in module.modules()]
        for size in [s for s in sizes if s is not None] + [224, 32]:
            yield drawn(2, convolution.in_channels, *_sides(size))


def _sides(size: Any) -> tuple[int, int]:
    if isinstance(size, dict):
        size = [size.get("height", 0), size.get("width", 0)]
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(height), int(width)


class _Configured:
    """Random arguments of a Hugging Face module by their names."""

    def __init__(self, module: nn.Module, generator: torch.Generator) -> None:
        self.module, self.generator, self.dtype = module, generator, _dtype(module)
        self.config: Any = module.config
        arguments = [
            a
            for a in inspect.signature(module.forward).parameters.values()
            if a.kind in (a.POSITIONAL_OR_KEYWORD, a.KEYWORD_ONLY)
        ]
        self.names = [a.name for a in arguments]
        self.required = [a.name for a in arguments if a.default is a.empty]
        self.text = vocabulary(self.config)
        self.chosen: list[str] = []

    def batches(self) -> Iterator[dict[str, Any]]:
        """Batches of required arguments and the main input, then with one more, then with all."""
        main: Any = getattr(self.module, "main_input_name", None)
        mains = [main] if isinstance(main, str) else list(main or ())
        least = [*self.required, *([n for n in mains if n in self.names] or self.names[:1])]
        if getattr(self.config, "is_encoder_decoder", False) and self.text is not None:
            least.append("decoder_input_ids")
        if "spatial_shapes" in self.names:
            least += ["spatial_shapes", "pixel_attention_mask"]
        more = [n for n in MORE if n in self.names and n not in least]
        every = [*more, *(n for n in self.names if n.endswith("grid_thw"))]
        for added in [[], *([n] for n in more), every]:
            self.chosen = [n for n in self.names if n in (*least, *added)]
            options = {name: list(self.values(name)) for name in self.chosen}
            options = {name: values for name, values in options.items() if values}
            if options and all(name in options for name in (*self.required, *added)):
                for values in itertools.islice(itertools.product(*options.values()), ATTEMPTS):
                    yield self.with_image_tokens(dict(zip(options, values, strict=True)))

    def with_image_tokens(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch whose text contains the tokens that stand for the picture's features."""
        token = self.entry("image_token_id", "image_token_index")
        if not {"pixel_values", "input_ids"} <= batch.keys() or not isinstance(token, int):
            return batch
        pictures = {n: v for n, v in batch.items() if n in ("pixel_values", "image_grid_thw")}
        try:
            with torch.no_grad():
                output: Any = self.module.get_image_features(**pictures)
            features = getattr(output, "pooler_output", output)
            rows = sum(f.numel() // f.shape[-1] for f in features)
        except Exception:  # the module has no such method, or rejects the input
            return batch
        ids = torch.cat([torch.full((2, rows // 2), token), batch["input_ids"]], 1)
        return {**batch, "input_ids": ids}

    # --- sizes ------------------------------------------------------------------------------------

    def entry(self, *names: str) -> Any:
        """The first of these entries of the config, or of the configs in it, that is not None."""
        waiting = [self.config]
        while waiting:
            config = waiting.pop(0)
            for name in names:
                value = getattr(config, name, None)
                if value is not None:
                    return value
            waiting += [v for v in vars(config).values() if hasattr(v, "to_dict")]
        return None

    def size(self, *names: str, default: int) -> int:
        return int(self.entry(*names) or default)

    def part(self, *kinds: type[nn.Module]) -> Any:
        return next((p for p in self.module.modules() if isinstance(p, kinds)), None)

    def width(self) -> int:
        return self.size("hidden_size", "d_model", "embed_dim", "width", default=64)

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def channels(self) -> int:
        declared = self.entry("num_channels", "in_channels", "in_chans", "num_input_channels")
        convolution = self.part(nn.Conv2d, nn.Conv3d)
        return int(declared or (convolution.in_channels if convolution is not None else 3))

    def sides(self) -> list[tuple[int, int]]:
        """Heights and widths of pictures."""
        declared = self.entry("image_size", "img_size", "input_size")
        sides = [_sides(declared)] if declared else []
        return sides + [(s, s) for s in SIDES if (s, s) not in sides]

    def frames(self) -> list[int]:
        """Numbers of frames of a spectrum."""
        declared = self.entry("max_length"), 2 * (self.entry("max_source_positions") or 0)
        return [*(int(n) for n in declared if n), 4 * TOKENS, 8 * TOKENS]

    def bins(self) -> list[int]:
        """Numbers of bins of a spectrum."""
        first = self.part(nn.Conv1d, nn.Linear)
        width = getattr(first, "in_channels", None) or getattr(first, "in_features", None)
        names = ("num_mel_bins", "n_mels", "mel_bins", "input_feat_size", "feature_size")
        return list(dict.fromkeys(int(n) for n in (self.entry(*names), width, *BINS) if n))

    # --- pictures as rows of patches --------------------------------------------------------------

    def patched(self) -> bool:
        return any(name in CUT for name in self.chosen)

    def grid(self) -> int:
        """Patches along a side of a picture: two of the groups that the module merges."""
        merged = self.entry("spatial_merge_size", "merge_size", "pooling_kernel_size") or 2
        return 2 * int(_sides(merged)[0])

    def patches(self) -> Iterator[Tensor]:
        """Patches of as many entries as the first matrix or convolution reads."""
        first = self.part(nn.Conv2d, nn.Conv3d, nn.Linear)
        shape = (3, 16, 16) if first is None else first.weight.shape[1:]
        count = self.grid() ** 2
        rows = (2 * count,) if any(n.endswith("grid_thw") for n in self.chosen) else (2, count)
        yield self.drawn(*rows, math.prod(shape))
        yield self.drawn(*rows, *shape)

    # --- arguments --------------------------------------------------------------------------------

    def values(self, name: str) -> Iterator[Any]:
        """Values of an argument, likeliest first; none if its name is unknown."""
        for pattern, draw in _ARGUMENTS:
            if re.fullmatch(pattern, name):
                yield from draw(self)
                return

    def pictures(self) -> Iterator[Tensor]:
        if self.patched():
            yield from self.patches()
            return
        sides, channels = self.sides(), self.channels()
        yield self.drawn(2, channels, *sides[0])
        yield from self.videos()
        for side in sides[1:]:
            yield self.drawn(2, channels, *side)

    def videos(self) -> Iterator[Tensor]:
        count = self.size("num_frames", "frames_per_clip", default=2)
        yield self.drawn(2, count, self.channels(), *self.sides()[0])

    def sounds(self) -> Iterator[Tensor]:
        waves = [(2, SAMPLES), (2, 1, FEW_SAMPLES), (2, 1, SAMPLES)]
        spectra = [(2, frames, self.bins()[0]) for frames in self.frames()]
        first = self.part(nn.Conv1d, nn.Conv2d, nn.Linear)
        is_spectrum = self.entry("num_mel_bins") is not None or isinstance(first, nn.Linear)
        for shape in [*spectra, *waves] if is_spectrum else [*waves, *spectra]:
            yield self.drawn(*shape)

    def spectra(self) -> Iterator[Tensor]:
        for bins in self.bins():
            for frames in self.frames():
                yield self.drawn(2, bins, frames)
                yield self.drawn(2, frames, bins)
            yield self.drawn(2, 1, self.frames()[0], bins)

    def patch_positions(self) -> Iterator[Tensor]:
        side = range(self.grid())
        yield torch.tensor([list(itertools.product(side, side))] * 2)

    def patch_masks(self) -> Iterator[Tensor]:
        """A mask of every other patch."""
        patch = _sides(self.entry("patch_size") or 16)
        frames = self.size("num_frames", default=1) // self.size("tubelet_size", default=1)
        count = math.prod(s // p for s, p in zip(self.sides()[0], patch, strict=True))
        yield (torch.arange(max(frames, 1) * count) % 2 == 0).repeat(2, 1)

    def boxes(self) -> Iterator[Tensor]:
        largest = self.size("max_2d_position_embeddings", default=1024) - 1
        corners = torch.rand(2, TOKENS, 2, 2, generator=self.generator).sort(dim=2).values
        yield (corners * largest).long().flatten(2)
        yield corners.flatten(2).to(self.dtype)

    def visual_features(self) -> Iterator[Tensor]:
        width = self.entry("visual_feat_dim", "visual_embedding_dim")
        if width is not None:
            yield self.drawn(2, TOKENS, int(width))

    def flat_patches(self) -> Iterator[Tensor]:
        """Rows of row number, column number and entries."""
        first = self.part(nn.Linear)
        if first is not None:
            side = torch.arange(TOKENS).expand(2, -1)
            numbers = torch.stack([1 + side // 4, 1 + side % 4], -1).to(self.dtype)
            yield torch.cat([numbers, self.drawn(2, TOKENS, first.in_features)], -1)

    def states(self) -> Iterator[Tensor]:
        if self.patched():
            yield from self.patches()
            return
        convolution = self.part(nn.Conv1d)
        yield self.drawn(2, TOKENS, self.width())
        if convolution is not None:
            yield self.drawn(2, convolution.in_channels, FEW_SAMPLES)
            yield self.drawn(2, convolution.in_channels, TOKENS)

    def series(self) -> Iterator[Tensor]:
        length = self.size("context_length", "seq_length", default=4 * TOKENS)
        yield self.drawn(2, length)
        yield self.drawn(2, length, self.size("num_input_channels", "input_size", default=1))


_ARGUMENTS: tuple[tuple[str, Callable[[_Configured], Iterable[Any]]], ...] = (
    (r"(.*_)?input_ids|task_inputs", lambda c: [_ids(c.text, c.generator)] if c.text else []),
    (r"(.*_)?pixel_values(_videos)?_videos|video_values", _Configured.videos),
    (r"(.*_)?(pixel_values|images)|prompt_masks", _Configured.pictures),
    (r"(.*_)?(input_features|audio_mel)", _Configured.spectra),
    (r"(.*_)?(input_values|waveform)", _Configured.sounds),
    (
        r"(.*_)?(input_features|audio_mel)_mask",
        lambda c: [torch.ones(2, n, dtype=torch.bool) for n in c.frames()],
    ),
    (r"(.*_)?grid_thw", lambda c: [torch.tensor([[1, c.grid(), c.grid()]] * 2)]),
    (r"merge_sizes", lambda c: [torch.tensor([c.grid() // 2] * 2)]),
    (r"spatial_shapes|target_sizes", lambda c: [torch.tensor([[c.grid(), c.grid()]] * 2)]),
    (r"pixel_position_ids", _Configured.patch_positions),
    (r"bool_masked_pos", _Configured.patch_masks),
    (
        r"(.*_)?attention_mask",
        lambda c: [torch.ones(2, c.grid() ** 2 if c.patched() else TOKENS, dtype=torch.long)],
    ),
    (r"bbox", _Configured.boxes),
    (r"visual_feats|visual_embeds", _Configured.visual_features),
    (r"visual_pos", lambda c: [torch.rand(2, TOKENS, 4, generator=c.generator).to(c.dtype)]),
    (r"flattened_patches", _Configured.flat_patches),
    (
        r"encoder_hidden_states",
        lambda c: [
            c.drawn(
                2,
                TOKENS,
                c.size("encoder_hidden_size", "cross_attention_hidden_size", default=c.width()),
            )
        ],
    ),
    (r"(.*_)?hidden_states|(.*_)?embeds", _Configured.states),
    (r"past_values", _Configured.series),
    (r"past_values_padding", lambda c: [torch.zeros(2, next(c.series()).shape[1])]),
    (r"freq", lambda c: [torch.zeros(2, 1, dtype=torch.long)]),
    (r"timesteps?", lambda c: [torch.arange(TOKENS).repeat(2, 1)]),
    (r"rewards|returns_to_go", lambda c: [c.drawn(2, TOKENS, 1)]),
    (r"states", lambda c: [c.drawn(2, TOKENS, c.size("state_dim", default=1))]),
    (r"actions", lambda c: [c.drawn(2, TOKENS, c.size("act_dim", default=1))]),
)
"""Patterns of arguments' names and the functions that draw them; the first that matches counts."""
