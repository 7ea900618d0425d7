"""Read the entries of one config with its family's defaults; note every entry left unread."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...errors import DomainError, brief, domain_error
from ...files import MOST
from ...formulas.activation import registered_function
from ...formulas.checks import check_count
from ..positions import Rotary
from ..weights import Biases

# Activation functions: name in transformers -> name here
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
    "relu2": "relu_squared",
    "leaky_relu": "leaky_relu",
    "tanh": "tanh",
    "xielu": "xielu",
    "sigmoid": "sigmoid",
    "linear": "identity",
}

# Entries without effect on the moments at initialisation, by topic.
_SILENT = {
    "identities and files": "_commit_hash _name_or_path architectures auto_map model_type "
    "name_or_path tokenizer_class transformers_version",
    "outputs, cache, precision, speed": "_attn_implementation _attn_implementation_internal "
    "_output_attentions attn_implementation cache_implementation dtype gradient_checkpointing "
    "loss_type output_attentions output_hidden_states output_past pretraining_tp return_dict "
    "slow_but_exact torch_dtype torchscript use_bfloat16 use_cache",
    "special tokens": "bos_token bos_token_id cls_token_id decoder_start_token_id eos_token "
    "eos_token_id mask_token mask_token_id pad_token pad_token_id sep_token_id",
    "generation": "bad_words_ids begin_suppress_tokens diversity_penalty do_sample "
    "early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty "
    "forced_bos_token_id forced_eos_token_id length_penalty max_length min_length "
    "no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores prefix "
    "remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens "
    "task_specific_params temperature top_k top_p typical_p",
    "tasks other than the family's own": "_num_labels classifier_activation classifier_dropout "
    "classifier_dropout_prob finetuning_task id2label label2id num_labels pooler_dropout "
    "pooler_hidden_act pooler_hidden_size problem_type summary_activation summary_first_dropout "
    "summary_last_dropout summary_proj_to_labels summary_type summary_use_proj tf_legacy_loss "
    "tie_encoder_decoder",
}
IRRELEVANT = frozenset(name for names in _SILENT.values() for name in names.split())

# Entries that any config may have, with the value at which they have no effect.
USUAL: Mapping[str, Any] = {
    "add_cross_attention": False,
    "attention_bias": False,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "pruned_heads": {},
    "quantization_config": None,
}


NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers"),
    "width": ("hidden_size", "n_embd", "dim", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "hidden": ("intermediate_size", "ffn_dim", "hidden_dim", "d_ff", "dff"),
    "length": ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
    "activation": ("hidden_act", "activation_function", "hidden_activation", "activation", "afn"),
    "epsilon": (
        *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    ),
    "dropout": (
        *("hidden_dropout_prob", "hidden_dropout", "resid_pdrop", "resid_dropout"),
        *("residual_dropout", "dropout"),
    ),
    "attention_dropout": ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"),
    "embedding_dropout": ("embd_pdrop", "embed_dropout", "embedding_dropout"),
    "variance": ("initializer_range", "init_std"),
}
"""Quantity -> the entry names families use for it; no family has two of them."""

ROTARY = ("rope_scaling", "rope_parameters")
"""Entries that hold the rotary parameters: the earlier name, then the present one."""
_ROTARY_ENTRIES = (
    "partial_rotary_factor rope_theta rope_type type"
    " mrope_interleaved mrope_section"  # for images; text positions are equal in all sections
)
_YARN = "beta_fast beta_slow factor mscale mscale_all_dim original_max_position_embeddings"
_SCALING_ENTRIES = {
    "linear": "factor",
    "dynamic": f"alpha {_YARN}",  # as in Hunyuan's released configs, whose module reads only alpha
    "yarn": f"attention_factor llama_4_scaling_beta max_position_embeddings truncate {_YARN}",
    "longrope": "attention_factor factor long_factor original_max_position_embeddings short_factor",
    "llama3": "factor high_freq_factor low_freq_factor original_max_position_embeddings",
    "proportional": "factor",
}
"""Scaling type (`rope_type`) -> names of its further rotary entries."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""Layer types: attention to all tokens, and within a sliding window."""
MOST_LAYERS = 100_000
"""Upper bound on depth: beyond any real stack, yet per-layer lists stay small."""
MOST_DEVIATION = 1e100
"""Largest standard deviation: products of a few of its squares still fit a float."""


class Entries:
    """Entries of one config, with errors that name the entry and notes on unmodelled ones.

    Attributes:
        read: names of the entries read so far.
        notes: one sentence per entry that is not modelled.

    Args:
        given: the config.
        kind: its `model_type`.
        defaults: values of missing entries, from the family's config class.
    """

    def __init__(self, given: Mapping[str, Any], kind: str, defaults: Mapping[str, Any]) -> None:
        self.kind = kind
        self.notes: list[str] = []
        self._objects: dict[str, Entries] = {}
        self._given = given
        self._defaults = defaults
        self.read = {"model_type"}

    def __call__(self, name: str, default: Any = ...) -> Any:
        """The entry, else the family's default, else `default`.

        Raises:
            DomainError: all three are missing, or the entry's type is not that of the default.
        """
        self.read.add(name)
        usual = self._defaults.get(name)
        if usual is None:
            usual = default
        value = self._given.get(name)
        if value is not None:
            return _of_type(name, value, usual)
        if usual is ...:
            raise DomainError(f"config of type {self.kind!r} lacks the entry {name!r}")
        return usual

    def known(self, what: str) -> str | None:
        """The family's entry name for a quantity of `NAMES`; None if its class has none."""
        return next((name for name in NAMES[what] if name in self._defaults), None)

    def called(self, what: str) -> str:
        """As `known`, but the most common name if the class has none."""
        return self.known(what) or NAMES[what][0]

    def has(self, name: str) -> bool:
        """Whether the config itself gives the entry a value."""
        self.read.add(name)
        return self._given.get(name) is not None

    def null(self, name: str) -> bool:
        """Whether the config gives the entry as null."""
        self.read.add(name)
        return name in self._given and self._given[name] is None

    def replaced(self, **values: Any) -> Entries:
        """A copy with some entries changed; it shares `read` and `notes` with this one."""
        copied = copy.copy(self)
        copied._given = {**self._given, **values}
        self.read.update(values)
        return copied

    def number(self, name: str, default: Any = ...) -> float:
        """A real entry."""
        return float(_of_type(name, self(name, default), 0.0))

    def count(self, name: str, default: Any = ...) -> int:
        """An entry that is a positive integer."""
        value = self(name, default)
        check_count(name, value)
        return int(value)

    def counts(self, name: str, layers: int) -> list[int]:
        """An entry that is a positive integer for all layers, or a list of one for each."""
        given = self._given.get(name)
        if not isinstance(given, list):
            return [self.count(name)] * layers
        self.read.add(name)
        if len(given) != layers:
            raise domain_error(name, given, f"an integer, or a list of {layers}")
        for index, value in enumerate(given):
            check_count(f"{name}[{index}]", value)
        return given

    def inside(self, name: str, usual: Any = None) -> Entries:
        """The entries of a nested object, empty if it is missing; `usual` are their defaults."""
        given = _of_type(name, self(name, {}), {})
        nested = Entries(given, f"{self.kind}.{name}", usual or {})
        nested.notes = self.notes
        self._objects[name] = nested
        return nested

    def several(self, name: str, like: Any, count: int | None = None) -> list[Any]:
        """A list of `count` items, each of the type of `like`; empty if the entry is missing."""
        given = _of_type(name, self(name, []), [])
        if given and count not in (None, len(given)):
            raise domain_error(name, given, f"a list of {count}")
        return [_of_type(f"{name}[{index}]", item, like) for index, item in enumerate(given)]

    def kinds(
        self,
        usual: Sequence[str],
        allowed: Collection[str] = (FULL, SLIDING),
        name: str = "layer_types",
    ) -> list[str]:
        """The type of every layer, from the list `name`; `usual` if that is missing.

        Raises:
            DomainError: a type that is not allowed, or a list of another length than `usual`.
        """
        given = self.several(name, "") or list(usual)
        if len(given) != len(usual) or not set(given) <= set(allowed):
            words = f"{len(usual)} of {', '.join(map(repr, allowed))}"
            raise domain_error(name, given, words)
        return given

    def flag(self, name: str, default: Any = ...) -> bool:
        """An entry that is true or false."""
        return bool(_of_type(name, self(name, default), False))

    def positive(self, name: str, default: Any = ...) -> float:
        """A real entry above zero."""
        value = self.number(name, default)
        if value <= 0:
            raise domain_error(name, value, "positive")
        return value

    def layers(self, name: str, default: Any = ...) -> int:
        """A number of layers, bounded because per-layer lists are built from it."""
        value = self.count(name, default)
        if value > MOST_LAYERS:
            raise domain_error(name, value, f"at most {MOST_LAYERS}")
        return value

    def variance(self, name: str | None = None, default: Any = ...) -> float:
        """The square of a standard deviation; None: the one that most matrices share."""
        name = self.called("variance") if name is None else name
        value = self.number(name, default)
        if abs(value) > MOST_DEVIATION:
            raise domain_error(name, value, f"a standard deviation of at most {MOST_DEVIATION:g}")
        return value**2

    def texts(self, name: str) -> list[str]:
        """A list of words, given as a list or as one string separated by |."""
        given = self(name, None)
        if given is None or isinstance(given, str):
            return [word for word in (given or "").split("|") if word]
        if not isinstance(given, list | tuple) or not all(isinstance(w, str) for w in given):
            raise domain_error(name, given, "a list of texts")
        return list(given)

    def activation(self, name: str) -> str:
        """The name in this package of the activation function in an entry."""
        given = self(name)
        if isinstance(given, str) and registered_function(given) is not None:
            return given
        if not isinstance(given, str) or given not in ACTIVATIONS:
            remedy = "moments.register_activation(name, function, derivative) makes it known"
            raise domain_error(name, given, f"one of {', '.join(ACTIVATIONS)}", remedy)
        return ACTIVATIONS[given]

    def length(
        self, name: str, seq_len: int | None, *, table: bool = True, default: Any = ...
    ) -> int:
        """Tokens per sequence: `seq_len`, or by default the maximum that entry `name` gives.

        Args:
            table: whether positions index a table, so that longer sequences are an error.
            default: the maximum if the entry is missing.
        """
        most = self(name, default)
        return self.at_most(check_count(name, most, least=2), seq_len, name, table)

    def at_most(self, most: int, seq_len: int | None, meaning: str, table: bool = True) -> int:
        """Tokens per sequence: `seq_len`, or by default `most`, which `meaning` names in errors."""
        if seq_len is None:
            return most
        check_count("seq_len", seq_len)
        if table and seq_len > most:
            raise domain_error("seq_len", seq_len, f"at most {meaning} = {most}")
        return seq_len

    def padding(self) -> int | None:
        """The padding token, whose row is zero; None if the table has no such row.

        A null in the config does not stand for the default: it means no padding token.
        """
        if self.null("pad_token_id"):
            return None
        token = self("pad_token_id", -1)
        table = isinstance(token, int) and 0 <= token < self.count("vocab_size")
        return token if table else None

    def biases(self, existing: tuple[str, ...]) -> Biases | None:
        """Zero biases on the matrices `existing`; None if there are none."""
        return Biases.of(*existing) if existing else None

    def cap(self, name: str, default: Any = ...) -> float | None:
        """A positive number; None if the config or the default says null."""
        present = not self.null(name) and self(name, default) is not None
        return self.positive(name) if present else None

    def window(self, name: str, seq_len: int) -> int | None:
        """Width of the attention window in tokens; None if it covers the whole sequence.

        A null in the config does not stand for the default: it means no window.
        """
        reach = None if self.null(name) else self(name, None)
        if reach is None:
            return None
        check_count(name, reach)
        return int(reach) if reach < seq_len else None

    def windows(
        self, kinds: Any, windowed: str, name: str, seq_len: int
    ) -> tuple[int | None, ...] | None:
        """Attention window of every layer, on layers of type `windowed`; None if all are full."""
        reach = self.window(name, seq_len)
        reaches = tuple(reach if kind == windowed else None for kind in kinds)
        return reaches if any(reaches) else None

    def labels(self) -> int:
        """Number of classes of a classifier."""
        names = _of_type("id2label", self("id2label", {}), {})
        return self.count("num_labels", len(names) or 2)

    def usual(self, name: str) -> Mapping[str, Any]:
        """The family's default of an entry that is an object."""
        default: Mapping[str, Any] = self._defaults.get(name, {})
        return default

    def rope(self) -> Mapping[str, Any]:
        """The rotary parameters, from the entry under either of its names."""
        given: Mapping[str, Any] = {}
        for name in ROTARY:
            value = self(name, {}) if self.has(name) else {}
            given = given or _of_type(name, value, {})
        return given

    def rotary(
        self,
        base: str = "rope_theta",
        fraction: str = "partial_rotary_factor",
        scaled: tuple[str, ...] = (),
    ) -> Rotary:
        """Rotary positions, from `rope_parameters` or from the entries that it replaced.

        Modules rotate every feature, whatever `partial_rotary_factor` says, unless the family's
        defaults have that entry.

        Args:
            base, fraction: the family's names of the replaced entries.
            scaled: scaling types that the family's reader handles itself.
        """
        usual = self._defaults.get("rope_parameters", {})
        given = self.rope()
        kind = given.get("rope_type", given.get("type", "default"))
        if kind != "default" and kind not in scaled:
            self.leave_out("rope_type", kind, "unscaled rotary frequencies are assumed")
        values = {}
        for name, old, fallback in (
            ("rope_theta", base, 10000.0),
            ("partial_rotary_factor", fraction, 1.0),
        ):
            sources = ((name, given.get(name)), (old, self(old, None)))
            numbers = [_of_type(entry, value, 1.0) for entry, value in sources if value is not None]
            values[name] = float(_first(*numbers, usual.get(name), fallback))
        part = values["partial_rotary_factor"]
        if part != 1 and "partial_rotary_factor" not in usual:
            self.leave_out("partial_rotary_factor", part, "the module turns every feature")
            part = 1.0
        return Rotary(part, values["rope_theta"])

    def without(self, name: str, meaning: str) -> None:
        """Note an unmodelled number unless it is 0."""
        if value := self.number(name):
            self.leave_out(name, value, meaning)

    def leave_out(self, name: str, value: Any, meaning: str) -> None:
        """Note an entry whose value is not modelled."""
        self.read.add(name)
        self.notes.append(f"{name} = {brief(value)} is not modelled: {meaning}")

    def expect(self, name: str, usual: Any, meaning: str) -> None:
        """Note an entry unless it has `usual`, the only value that is modelled."""
        self.read.add(name)
        if (value := self._given.get(name, usual)) != usual:
            self.leave_out(name, value, meaning)

    def same_as(self, other: str, name: str) -> None:
        """Read a second entry, `other`, for the same quantity as `name`.

        Raises:
            DomainError: the two differ.
        """
        if self.has(other) and self.has(name) and self(other) != self(name):
            raise domain_error(
                other, self(other), f"{name} = {brief(self(name))}, which it repeats"
            )
        self.read.add(other)

    def refuse(self, name: str, usual: Any, feature: str) -> None:
        """Refuse a feature that `Transformer` cannot express.

        Raises:
            DomainError: the entry is not `usual`, so that the feature is on.
        """
        if (value := self(name, usual)) != usual:
            remedy = f"{feature} is outside what moments models"
            raise domain_error(name, value, f"{usual!r}", remedy)

    def finish(self, usual: Mapping[str, Any]) -> None:
        """Note every unread entry, except those known to have no effect.

        Args:
            usual: the family's unmodelled entries, with the value at which they have no effect.

        Raises:
            DomainError: an entry whose type is not that of the family's default.
        """
        known, (kind, *inner) = {**USUAL, **usual}, self.kind.split(".")
        for name, value in self._given.items():
            if name in IRRELEVANT or value is None:
                continue
            if not (isinstance(value, list) and name in self.read):  # where `counts` checked
                _of_type(name, value, self._defaults.get(name))
            if name in ROTARY and isinstance(value, Mapping):
                self._finish_rotary(name, value)
            elif name in self._objects:
                self._objects[name].finish(usual)
            silent = name in known and (value == known[name] or known[name] is ...)
            if name not in self.read and not silent:
                why = "it is left out" if name in known else f"no entry of {kind!r} known here"
                path = ".".join((*inner, name))
                self.notes.append(f"{path} = {brief(value)} is not modelled: {why}")

    def _finish_rotary(self, path: str, given: Mapping[str, Any]) -> None:
        """Note unknown entries among rotary parameters, which may be nested by layer type."""
        scaled = str(given.get("rope_type") or given.get("type") or "default")
        known = f"{_ROTARY_ENTRIES} {_SCALING_ENTRIES.get(scaled, '')}".split()
        for name, value in given.items():
            if isinstance(value, Mapping):
                self._finish_rotary(f"{path}.{name}", value)
            elif name not in known and value is not None:
                why = f"no entry of {scaled!r} positions known here"
                self.notes.append(f"{path}.{name} = {brief(value)} is not modelled: {why}")


# Type of the default -> allowed types of the entry, and their name in errors.
_TYPES: tuple[tuple[type, Any, str], ...] = (
    (bool, bool, "true or false"),
    (int, int, "an integer"),
    (float, (int, float), "a number"),
    (str, str, "a text"),
    (Mapping, Mapping, "a JSON object"),
    (list, (list, tuple), "a list"),
)


def _of_type(name: str, value: Any, usual: Any) -> Any:
    """The value, checked to have the type of `usual`; None and ... allow any type.

    An integer is also a number, a boolean is neither; numbers are finite, integers within 64 bits.
    """
    for kind, allowed, words in _TYPES:
        if isinstance(usual, kind):
            if not isinstance(value, allowed) or isinstance(value, bool) != (kind is bool):
                raise domain_error(name, value, words)
            break
    if isinstance(value, float) and not math.isfinite(value):
        raise domain_error(name, value, "finite")
    if isinstance(value, int) and abs(value) > MOST:
        raise domain_error(name, value, "an integer below 2^63")
    return value


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
