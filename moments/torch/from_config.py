"""The prediction of a config of any type that transformers builds, from its module.

The module on the meta device gives the true shapes; its own `_init_weights`, run over evenly spread
samples of every parameter, gives the variances. Two narrow modules of the true depth are read as
`describe` reads a module; fields that depend on the width or a window differ between them.

What no Transformer describes is predicted by the operations of a narrow module, every width divided
by one number. The variance of a matrix is multiplied by the ratio of the features that it sums over
(`Lowering.wider`): to leading order in 1/width the signal is that of the config's module, and
gradients are so up to one common factor.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..errors import DomainError, MomentsError, Undeclared, domain_error, optional, refused
from ..formulas.checks import check_count
from ..model.embedding import Embedding
from ..model.huggingface.config import family, nearest
from ..model.huggingface.entries import IRRELEVANT, USUAL
from ..model.transformer import Transformer
from ..model.weights import MATRICES
from ..show.findings import Report
from .dataflow import ModuleReading, read
from .dataflow.reading import biases_of, in_every_layer, one_or_all
from .huggingface_modules import named_class
from .open_check import NotRead, report_of
from .operations.predict import ModulePrediction, lowered, summary
from .roles import block_of, tensors_of
from .running import aliases, padding_rows

with optional("hf", "torch", "transformers"):
    import torch
    import transformers
    from torch import Tensor, nn
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import PretrainedConfig
    from transformers.models.auto import modeling_auto

_TASKS = (
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
)

_PAIRED = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
)

# Older names of entries, which config classes accept besides those of their signatures.
_OLDER_NAMES = (
    "rope_theta rope_scaling partial_rotary_factor rotary_pct rotary_emb_base rope_local_base_freq "
    "global_rope_theta local_rope_theta sliding_window_pattern tie_word_embeddings"
)
_OLDER = frozenset(_OLDER_NAMES.split())
_SHAPING = frozenset(("id2label", "label2id", "num_labels", "problem_type"))
_WINDOWS = ("sliding_window", "local_attention", "window_size", "attention_window_size")

LARGEST = 2**28
"""Most entries of a narrow module; with more, its width depends on an unknown entry."""

VOCABULARY = 500
"""Rows of a narrow module's tables."""

NEAR = 1e-3
"""Relative difference up to which two factors, read in single precision, are equal."""

PARTS_ALIKE = 0.1
"""Relative difference of the mean squares of two parts of a parameter, of thousands of entries, up
to which they are drawn alike."""

_EDGES = ((128, 192), (256, 384))
"""Rows and columns of two samples of a matrix; if these differ, it is drawn by its shape."""

SAMPLED = 0.01
"""Relative spread of a variance over layers up to which they are drawn alike."""

_BY_SHAPE = 0.03
"""Relative difference of two samples' mean squares from which they differ."""

WIDTH = 256
"""Largest d_model of a narrow module."""

AGREED = 0.25
"""Relative difference of a variance at two widths from which it is noted: a root of the width in
the code changes it by 0.41 or more."""

DRAWS, FEW = 24, 8
"""Random draws of operations without a law, in the module and in the one of half its width."""

_WIDTHS = re.compile(
    r".*(hidden_sizes?|d_model|n_embd|n_embed|d_embed|embed_dim\w*|embedding_size|d_ff|n_inner|width"
    r"|intermediate\w*|ffn\w*|feed_?forward\w*|inner_dim\w*|mlp\w*dim\w*|hidden_dim|lora_rank"
    r"|dt_rank|time_step_rank|d_ssm|(?<!head_)(?<!rotary_)(?<!head)dim|projection_dim)"
)
_HEADS = re.compile(r".*(heads|n_head|num_kv|query_groups\w*|n_groups|num_heads\w*)")


def from_config(
    entries: Mapping[str, Any], seq_len: int | None
) -> tuple[Transformer, tuple[str, ...]]:
    """The declaration of a config whose type has no reader, and notes on what it leaves out.

    Raises:
        DomainError: transformers builds no module of that type, or no Transformer describes it;
            names the part.
    """
    kind = str(entries.get("model_type"))
    try:
        text = json.dumps(dict(entries), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise DomainError(f"config of type {kind!r}: {error}") from None
    model, notes = _declared(text)
    if seq_len is not None:
        check_count("seq_len", seq_len)
        embedding = model.embedding
        is_text = isinstance(embedding, Embedding)
        limited = embedding is not None and not (is_text and embedding.position_variance == 0)
        if limited and seq_len > model.seq_len:
            allowed = f"at most {model.seq_len}, the rows of its positions"
            raise domain_error("seq_len", seq_len, allowed)
        model = model.replace(seq_len=seq_len)
    windows = tuple(None if w is None or w >= model.seq_len else w for w in model.windows)
    return model.replace(window=windows if any(windows) else None), notes


def predicted(entries: Mapping[str, Any]) -> ModulePrediction:
    """The prediction of a config by the operations of its module.

    Raises:
        DomainError: transformers builds no module of it, or none that is narrow.
        MomentsError: the module cannot be run on random input.
    """
    near, far = _pair(json.dumps(dict(entries), sort_keys=True))
    result = near.followed()
    return dataclasses.replace(result, notes=(*_notes(near, far, result), *result.notes))


def checked(entries: Mapping[str, Any], refusal: Undeclared) -> Report:
    """`moments.check` of a config by the operations of its module.

    Raises:
        DomainError: the refusal, and why its operations could not be followed either.
    """
    try:
        near, far = _pair(json.dumps(dict(entries), sort_keys=True))
        with quietly():
            report = report_of(near.module, None, NotRead(str(refusal)), near.wider)
    except MomentsError as error:
        said = str(error).splitlines()[0]
        raise DomainError(f"{refusal}; nor are its operations followed: {said}") from error
    place = "" if far is None else f", in a module of width {near.width} for one of {near.true}"
    notes = (*_notes(near, far, None), *report.notes)
    return dataclasses.replace(report, notes=notes, read=report.read + place)


@functools.lru_cache(maxsize=64)
def _declared(text: str) -> tuple[Transformer, tuple[str, ...]]:
    entries = json.loads(text)
    kind = entries["model_type"]
    with quietly():
        config, unknown = settings(entries)
        try:
            _sizes(config)
            build = module_class(entries, config)
        except DomainError as error:
            raise Undeclared(str(error)) from error
        whole, shapes = on_meta(build, config)
        squares = squares_drawn(whole)
    try:
        with quietly():
            narrow = [_copy(config, number) for number in range(2)]
            copies = [Narrow.of(build, one, config, shapes) for one in narrow]
            for one in copies:
                rescale(one.module, squares)
        readings = [_reading(kind, one) for one in copies]
        model = _at_true_width(kind, config, shapes, copies, readings)
    except DomainError as error:
        raise Undeclared(str(error)) from error
    doubts = [note for note in readings[0].doubts if not note.endswith("measured by hooks")]
    if unknown:
        doubts.append(f"entries that {type(config).__name__} does not know are left out: {unknown}")
    return model, tuple(doubts)


@functools.lru_cache(maxsize=4)
def _pair(text: str) -> tuple[Narrow, Narrow | None]:
    """A narrow module, and one of half its width unless it has the config's own width."""
    entries = json.loads(text)
    with quietly():
        config, _ = settings(entries)
        build = module_class(entries, config, pairs=True)
        whole, shapes = on_meta(build, config)
        true, factor = _width(config), 1
        while true // factor > WIDTH:
            factor *= 2
        near = Narrow.of(build, _divided(config, factor), config, shapes)
        far = None
        if factor > 1:
            far = Narrow.of(build, _divided(config, 2 * factor), config, shapes)
        try:
            squares = squares_drawn(whole)
        except DomainError:  # a rule that needs whole tensors
            squares = {} if far is None else _extrapolated(near.module, far.module, factor)
        for narrow in (near, far):
            if narrow is not None:
                rescale(narrow.module, squares)
                _equalise_rows(narrow.module)
    return near, far


@contextmanager
def quietly() -> Iterator[None]:
    """Silence transformers and fix torch's random state within the context."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        transformers.logging.set_verbosity(level)


# --- modules of a config --------------------------------------------------------------------------


def settings(entries: Mapping[str, Any]) -> tuple[Any, str]:
    """The config object, and the names of entries that its class does not know.

    Entries that choose implementations, code, precision or files are not passed to transformers.
    """
    kind = entries["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        family(kind)  # raises, with similar types
    config_class = transformers.CONFIG_MAPPING[kind]
    known = set(inspect.signature(config_class.__init__).parameters) - {"self", "kwargs"}
    known = (known - IRRELEVANT | set(_TOKENS)) | _OLDER | _SHAPING
    passed, unknown = {}, []
    for name, value in entries.items():
        if name in _CHOOSING or name in IRRELEVANT - known or name.startswith("_"):
            continue
        # A number chooses no code: a module may read one that its config class does not name.
        if name in known or isinstance(value, int | float):
            passed[name] = value
        elif value is not None and value != USUAL.get(name):
            unknown.append(name)
    with refused(f"config of type {kind!r}"):
        return config_class(**passed), ", ".join(sorted(unknown))


_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
_CHOOSING_NAMES = (
    "architectures auto_map dtype torch_dtype quantization_config cache_implementation "
    "attn_implementation experts_implementation model_type return_dict"
)
_CHOOSING = frozenset(_CHOOSING_NAMES.split())


def module_class(entries: Mapping[str, Any], config: Any, *, pairs: bool = False) -> Any:
    """The module class that the config names, if it is of the config's type, else that of its task;
    `pairs`: also with an encoder and a decoder."""
    kind = entries["model_type"]
    if getattr(config, "is_encoder_decoder", False) and not pairs:
        raise DomainError(
            f"model_type = {kind!r}: an encoder and a decoder are not read from a config alone; "
            f"describe a module of them with moments.torch.describe{nearest(kind)}"
        )
    names = entries.get("architectures")
    tasks = (*_PAIRED, *_TASKS) if getattr(config, "is_encoder_decoder", False) else _TASKS
    usual = [getattr(modeling_auto, task).get(kind) for task in tasks]
    if result := named_class(config, *(names if isinstance(names, list) else ()), *usual):
        return result
    raise DomainError(f"model_type = {kind!r}: no model of text or of images{nearest(kind)}")


def on_meta(build: Any, config: Any) -> tuple[nn.Module, dict[str, tuple[int, ...]]]:
    """A config's module on the meta device, and the shapes of its parameters."""
    with refused(f"config of type {config.model_type!r}"), torch.device("meta"):
        whole = build(config)
    return whole, {name: tuple(p.shape) for name, p in named_parameters(whole)}


@dataclasses.dataclass(frozen=True)
class Narrow:
    """A module of a config's depth with smaller widths.

    Attributes:
        config: its own.
        wider: parameter -> by axis, the ratio of the config's size to the module's.
        true: d_model of the config.
    """

    config: Any
    module: nn.Module
    wider: dict[str, tuple[float, ...]]
    true: int

    @classmethod
    def of(
        cls, build: Any, narrow: Any, config: Any, shapes: Mapping[str, tuple[int, ...]]
    ) -> Narrow:
        """The module of a `narrow` config; `shapes`: of the parameters of the true one."""
        what, wider = f"a narrow copy of {build.__name__}", {}
        with refused(what):
            with torch.device("meta"):
                size = sum(p.numel() for p in build(narrow).parameters())
            if size > LARGEST:
                raise DomainError(f"{what} has {size:.2g} parameters: its width has other entries")
            module = build(narrow)
        for name, parameter in named_parameters(module):
            if len(shapes.get(name, ())) != parameter.ndim:
                raise DomainError(f"{what} has another {name} than the true one")
            pairs = zip(shapes[name], parameter.shape, strict=True)
            wider[name] = tuple(big / small for big, small in pairs)
        return cls(narrow, module, wider, _width(config))

    @property
    def width(self) -> int:
        """Its d_model."""
        return _width(self.config)

    def followed(self, draws: int = DRAWS) -> ModulePrediction:
        """The prediction by operations for the config's module.

        Raises:
            MomentsError: it cannot be run.
        """
        return summary(lowered(self.module, None, draws=draws, wider=self.wider), draws)


def _width(config: Any) -> int:
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    for part in (inner, config):
        for name in ("hidden_size", "d_model", "n_embd", "embed_dim", "dim"):
            value = getattr(part, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return 1


def _divided(config: Any, factor: int) -> Any:
    """A config, and the configs in it, with every width and number of heads divided by `factor`."""
    narrow = copy.deepcopy(config)
    narrow.use_cache = False
    for name, value in list(vars(narrow).items()):
        if isinstance(value, PretrainedConfig):
            setattr(narrow, name, _divided(value, factor))
        elif _HEADS.fullmatch(name) or _WIDTHS.fullmatch(name):
            if isinstance(value, list) and all(type(v) is int for v in value):
                setattr(narrow, name, [max(1, v // factor) for v in value])
            elif type(value) is int:
                setattr(narrow, name, max(1, value // factor))
        elif name == "vocab_size" and type(value) is int:
            setattr(narrow, name, min(VOCABULARY, value))
    cut_tokens(narrow)
    return narrow


def _copy(config: Any, number: int) -> Any:
    """Narrow config 0 or 1 of a stack of attention and feed-forward blocks."""
    narrow, true = copy.deepcopy(config), _sizes(config)
    heads = 2 + number if true.heads > 1 else 1
    usual = true.heads * true.d_head == true.d_model
    width = heads * true.d_head if usual else 64 * (2 + number)
    narrow.num_attention_heads, narrow.hidden_size = heads, width
    if getattr(config, "num_key_value_heads", None) is not None:
        narrow.num_key_value_heads = heads if true.kv_heads == true.heads else 1
    for name in ("intermediate_size", "ffn_dim"):
        if isinstance(getattr(config, name, None), int):
            setattr(narrow, name, width + width // 2)
    for name in _windows_of(config):
        setattr(narrow, name, 4 + 2 * number)
    narrow.vocab_size = min(VOCABULARY, getattr(config, "vocab_size", VOCABULARY))
    cut_tokens(narrow)
    return narrow


def cut_tokens(config: Any) -> None:
    """Put the special tokens of a config inside its vocabulary."""
    rows = getattr(config, "vocab_size", None)
    if not isinstance(rows, int):
        return
    for name, token in list(vars(config).items()):
        if name.endswith("token_id") and type(token) is int:
            setattr(config, name, min(token, rows - 1))


def rescale(module: nn.Module, squares: Mapping[str, float]) -> None:
    """Scale every parameter to the mean square of the true one, without its padding row."""
    padding = padding_rows(module)
    with torch.no_grad():
        for name, parameter in named_parameters(module):
            true = squares.get(name)
            if true is None:
                continue
            rows = parameter.numel() // parameter.shape[-1]
            drawn = rows - (parameter in padding)
            own = float(parameter.double().square().sum()) / (drawn * parameter.shape[-1])
            if own > 0:
                parameter.mul_(math.sqrt(true / own))
            elif true > 0:
                raise DomainError(f"{name} is zero in a narrow copy and drawn in the true one")


class _Sizes(NamedTuple):
    d_model: int
    heads: int
    kv_heads: int
    d_head: int


def _windows_of(config: Any) -> dict[str, int]:
    return {k: v for k, v in vars(config).items() if k in _WINDOWS and isinstance(v, int)}


def _sizes(config: Any) -> _Sizes:
    result = []
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"):
        value = getattr(config, name, None)
        if not isinstance(value, int) or value < 1:
            raise DomainError(
                f"model_type = {config.model_type!r}: no stack of attention and feed-forward "
                f"blocks ({type(config).__name__} has {name} = {value!r})"
                f"{nearest(config.model_type)}"
            )
        result.append(value)
    _, d_model, heads = result
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    d_head = getattr(config, "head_dim", None) or d_model // heads
    return _Sizes(d_model, heads, int(kv_heads), int(d_head))


def named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module.named_parameters() if p.numel()]


# --- variances of a module's own initialisation ---------------------------------------------------


def squares_drawn(whole: nn.Module) -> dict[str, float]:
    """The mean square of every parameter that the module's own rule draws, without padding rows.

    Args:
        whole: on the meta device; its parameters are replaced by samples.
    """
    shapes = {name: tuple(p.shape) for name, p in named_parameters(whole)}
    first, second = (_sampled(whole, shapes, dict.fromkeys(shapes, e)) for e in _EDGES)
    by_shape = [n for n, v in first.items() if abs(v - second[n]) > _BY_SHAPE * max(v, second[n])]
    if large := [n for n in by_shape if math.prod(shapes[n]) > LARGEST]:
        raise DomainError(f"{large[0]} is drawn by its shape, and too large to be drawn here")
    if by_shape:
        edges = dict.fromkeys(shapes, _EDGES[1]) | dict.fromkeys(by_shape)
        second = _sampled(whole, shapes, edges)
    return second


def _sampled(
    whole: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    edges: Mapping[str, tuple[int, int] | None],
) -> dict[str, float]:
    """Mean squares of samples of so many rows and columns, or (None) of whole parameters."""
    names = [name for name, _ in whole.named_parameters(remove_duplicate=False)]
    first = {alias: names[0] for names in aliases(whole).values() for alias in names}
    for name in (name for name in names if first[name] in shapes):
        cut, edge = shapes[first[name]], edges[first[name]]
        if edge is not None:
            rows, *columns = cut
            most = round(edge[1] ** (1 / max(len(columns), 1)))
            cut = min(rows, edge[0]), *(min(n, most) for n in columns)
        path, _, last = name.rpartition(".")
        setattr(whole.get_submodule(path), last, nn.Parameter(torch.full(cut, math.nan)))
    for part in whole.modules():
        vars(part).pop("_is_hf_initialized", None)
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            part.padding_idx = 0
    with refused(f"the initialisation of {type(whole).__name__}"):
        with _Evenly():
            whole.initialize_weights()
        whole.tie_weights()
    result = {}
    padding = padding_rows(whole)
    for name in shapes:
        sample = whole.get_parameter(name).detach().double()
        if sample.isnan().any():
            continue
        skipped = whole.get_parameter(name) in padding and not bool(sample[0].any())
        result[name] = float(sample[int(skipped) :].square().mean())
    return result


class _Evenly(TorchDispatchMode):
    """Draws quantiles at equal distances, in random order, instead of random entries."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        normal = func is torch.ops.aten.normal_.default
        if not normal and func is not torch.ops.aten.uniform_.default:
            return func(*args, **(kwargs or {}))
        # mean and standard deviation, or both ends
        first, second = [*args[1:], *(0.0, 1.0)[len(args) - 1 :]][:2]
        size = second if normal else second - first
        return args[0].copy_(_quantiles(args[0], normal).mul_(size).add_(first))


def _quantiles(like: Tensor, normal: bool) -> Tensor:
    """Quantiles of the uniform distribution on (0, 1), or of a normal one of mean square 1."""
    count = like.numel()
    result = (torch.randperm(count, dtype=torch.float64) + 0.5) / count
    if normal:
        result = torch.erfinv(2 * result - 1)
        result = result / result.square().mean().sqrt()
    return result.reshape(like.shape).to(like.dtype)


# --- readings of the copies -----------------------------------------------------------------------


def _reading(kind: str, narrow: Narrow) -> ModuleReading:
    near = nearest(kind)
    try:
        result = read(narrow.module)
    except MomentsError as error:
        what = str(error).partition(": pass batch")[0]
        raise DomainError(
            f"model_type = {kind!r}: {what}; `moments check FILE.py:FACTORY` reads a module of it "
            f"on a batch of yours{near}"
        ) from error
    if result.model is None:
        raise DomainError(
            f"model_type = {kind!r}: {type(narrow.module).__name__} does what moments.Transformer "
            f"cannot declare: {'; '.join(result.reasons)}{near}"
        )
    if result.roles.unidentified:
        names = ", ".join(result.roles.unidentified[:3])
        raise DomainError(f"model_type = {kind!r}: no role is known of {names}{near}")
    sizes = _sizes(narrow.config)
    for name, heads in (("heads", sizes.heads), ("kv_heads", sizes.kv_heads)):
        if (read_heads := getattr(result.model, name)) != heads:
            raise domain_error(name, read_heads, f"{heads}, as the config of a narrow copy says")
    return result


def _at_true_width(
    kind: str,
    config: Any,
    shapes: Mapping[str, tuple[int, ...]],
    copies: list[Narrow],
    readings: list[ModuleReading],
) -> Transformer:
    """The narrow copies' model with the sizes of the config."""
    true, (first, second) = _sizes(config), (r.model for r in readings)
    assert first is not None
    assert second is not None
    widths = _Widths(kind, copies[0].width, copies[1].width, true.d_model)
    changes: dict[str, Any] = {
        "d_model": true.d_model,
        "heads": true.heads,
        "kv_heads": true.kv_heads,
        "window": _windows(kind, config, copies, first, second),
    }
    for name in ("temperature", "branch_scale", "skip_scale", "norm_gain", "logit_softcap"):
        changes[name] = widths.same(name, getattr(first, name), getattr(second, name))
    for part, name in (("embedding", "scale"), ("head", "output_scale")):
        one, two = getattr(first, part), getattr(second, part)
        if (one is None) != (two is None):
            raise DomainError(f"config of type {kind!r}: {part} that depends on the width")
        if one is None:
            continue
        fields: dict[str, Any] = {}
        if hasattr(one, name):
            fields[name] = widths.power(name, getattr(one, name), getattr(two, name))
        if getattr(one, "vocab_size", None) is not None:
            fields["vocab_size"] = config.vocab_size
        if getattr(one, "padding_id", None) is not None:
            fields["padding_id"] = config.pad_token_id
        changes[part] = _rounded(one.replace(**fields))
    squares = _squares(readings[0], copies[0])
    assert first.weights is not None
    variances = in_every_layer(MATRICES, first.layers, squares)
    changes["weights"] = _rounded(first.weights.replace(**variances))
    if first.biases is not None:
        changes["biases"] = _rounded(biases_of(first.layers, squares))
    roles_of: dict[str, set[str]] = {}
    for role in readings[0].roles.roles:
        if role.name in MATRICES:
            roles_of.setdefault(role.parameter, set()).add(role.name)
    outputs = [name for name, roles in roles_of.items() if roles == {"ffn_out"}]
    hidden = {math.prod(shapes[name]) / true.d_model for name in outputs}
    if len(hidden) != 1:
        raise DomainError(f"config of type {kind!r}: a hidden width that differs between layers")
    model = first.replace(d_ff=round(hidden.pop()), **changes)
    sizes = {name: math.prod(shape) for name, shape in model.matrix_shapes.items()}
    for name, roles in roles_of.items():
        size = sum(sizes[role] for role in roles)
        if math.prod(shapes[name]) != size:
            raise DomainError(
                f"config of type {kind!r}: {name} has {math.prod(shapes[name])} entries, and "
                f"{' and '.join(sorted(roles))} {size}"
            )
    return model


def _squares(reading: ModuleReading, narrow: Narrow) -> dict[tuple[int, str], float]:
    """Mean squares by layer and role: of a whole parameter, unless its parts are drawn unlike."""
    tensors, result = tensors_of(narrow.module), {}
    for role in reading.roles.roles:
        square = float(tensors[role.parameter].detach().double().square().mean())
        part = float(block_of(tensors, role).double().square().mean())
        alike = abs(part - square) < PARTS_ALIKE * square
        result[role.layer, role.name] = square if alike else part
    return result


def _rounded(part: Any) -> Any:
    """A declaration with variances of as many digits as samples have, one for all layers if these
    differ by sampling only."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if isinstance(value, tuple) and max(value) - min(value) < SAMPLED * max(value):
            value = sum(value) / len(value)
        if isinstance(value, float):
            changes[field.name] = float(f"{value:.6g}")
        elif isinstance(value, tuple):
            changes[field.name] = one_or_all([float(f"{v:.6g}") for v in value])
    return part.replace(**changes)


@dataclasses.dataclass(frozen=True)
class _Widths:
    """The widths of both copies and of the true module, and factors as powers of them."""

    kind: str
    first: int
    second: int
    true: int

    def same(self, name: str, one: Any, two: Any) -> Any:
        """A field that must not depend on the width."""
        x, y = (torch.tensor(v if v is not None else 0.0).double() for v in (one, two))
        if x.shape != y.shape or not torch.allclose(x, y, rtol=NEAR, atol=0.0):
            raise DomainError(f"config of type {self.kind!r}: {name} that depends on the width")
        return one

    def power(self, name: str, one: float, two: float) -> float:
        """A factor at the true width, by the power of the width that both copies follow."""
        for exponent in (0.0, 0.5, -0.5, 1.0, -1.0):
            if abs(two / one / (self.second / self.first) ** exponent - 1) < NEAR:
                return float(f"{one * (self.true / self.first) ** exponent:.6g}")
        raise DomainError(f"config of type {self.kind!r}: {name} that is no power of the width")


def _windows(
    kind: str, config: Any, copies: list[Narrow], first: Transformer, second: Transformer
) -> list[int | None]:
    """The window of every layer, linear in the config's entry for windows."""
    entries = list(_windows_of(config).values())
    narrow = [next(iter(_windows_of(one.config).values()), 0) for one in copies]
    result: list[int | None] = []
    for one, two in zip(first.windows, second.windows, strict=True):
        if one is two is None:
            result.append(None)
            continue
        if one is None or two is None or len(entries) != 1:
            raise DomainError(f"config of type {kind!r}: windows that follow no one entry")
        slope = (two - one) / (narrow[1] - narrow[0])
        result.append(round(one + slope * (entries[0] - narrow[0])))
    return result


# --- by operations --------------------------------------------------------------------------------


def _equalise_rows(module: nn.Module) -> None:
    """Scale all rows of a table to one mean square, which wide rows have without it."""
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.Embedding):
                squares = part.weight.square().mean(1, keepdim=True)
                drawn = squares > 0
                mean = squares[drawn].mean()
                part.weight.mul_(torch.where(drawn, (mean / squares).sqrt(), 0.0))


def _extrapolated(near: nn.Module, far: nn.Module, factor: int) -> dict[str, float]:
    """Mean squares at the config's width, by the half-integer powers of the width that two narrow
    modules follow."""
    result = {}
    others = dict(named_parameters(far))
    for name, parameter in named_parameters(near):
        x, y = (float(p.detach().double().square().mean()) for p in (parameter, others[name]))
        if x > 0 and y > 0:
            result[name] = x * factor ** (round(2 * math.log2(x / y)) / 2)
    return result


def _notes(near: Narrow, far: Narrow | None, result: ModulePrediction | None) -> list[str]:
    """Notes on the narrow module, and on variances that differ at a second width."""
    notes = [
        "followed operation by operation on 16 tokens at most, since moments.Transformer cannot "
        "declare what the module of this config does"
    ]
    if far is None:
        return notes
    notes.append(
        f"a module of width {near.width} with the config's depth stands for width {near.true}, its "
        "matrices for as many features as those have: gradients are up to one factor for all"
    )
    try:
        other, result = far.followed(FEW), result or near.followed(FEW)
    except MomentsError:
        return notes
    ratios = [
        (row.module, half.variance / row.variance)
        for row, half in zip(result.outputs, other.outputs, strict=False)
        if row.module == half.module and row.variance > 0
    ]
    if different := [(name, ratio) for name, ratio in ratios if abs(ratio - 1) > AGREED]:
        name, ratio = different[0]
        more = f" and {len(different) - 1} more" if different[1:] else ""
        notes.append(
            f"{name}{more}: the variance follows the width, {ratio:.3g} times at half of it; that "
            "of the config's width is not known"
        )
    return notes
