"""Entries of one config: read with the family's defaults, and what is left unread is named."""

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

# transformers' names of activation functions -> ours
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

# Entries that say nothing about the moments at initialisation, by what they are about.
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

# What every config may hold, with the value at which it changes nothing.
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
"""What families call the same thing; none has two of these."""

ROTARY = ("rope_scaling", "rope_parameters")
"""Objects of rotary entries, the second by their present name."""
_TURNED = (
    "partial_rotary_factor rope_theta rope_type type"
    " mrope_interleaved mrope_section"  # of pictures; those of a text are equal in all sections
)
_YARN = "beta_fast beta_slow factor mscale mscale_all_dim original_max_position_embeddings"
_SCALED = {
    "linear": "factor",
    "dynamic": f"alpha {_YARN}",  # Hunyuan's released ones, of which its module reads alpha
    "yarn": f"attention_factor llama_4_scaling_beta max_position_embeddings truncate {_YARN}",
    "longrope": "attention_factor factor long_factor original_max_position_embeddings short_factor",
    "llama3": "factor high_freq_factor low_freq_factor original_max_position_embeddings",
    "proportional": "factor",
}
"""Their names, by the type of positions."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers, with all tokens and with those of a window."""
MOST_LAYERS = 100_000
"""No stack is deeper, and lists of so many entries are no burden."""
MOST_DEVIATION = 1e100
"""Its square, and what a few products with it give, is still a number."""


class Entries:
    """Entries of one config, with errors that name the entry, and notes on what is left out.

    Attributes:
        read: names of the entries that were asked for so far.

    Args:
        given: the config.
        kind: its `model_type`.
        defaults: what the family's class means by an entry that is left out.
    """

    def __init__(self, given: Mapping[str, Any], kind: str, defaults: Mapping[str, Any]) -> None:
        self.kind = kind
        self.notes: list[str] = []
        self._objects: dict[str, Entries] = {}
        self._given = given
        self._defaults = defaults
        self.read = {"model_type"}

    def __call__(self, name: str, default: Any = ...) -> Any:
        """The entry, else the family's default, else `default`; of the same kind as they are.

        Raises:
            DomainError: there is none of them, or the entry is of another kind.
        """
        self.read.add(name)
        usual = self._defaults.get(name)
        if usual is None:
            usual = default
        value = self._given.get(name)
        if value is not None:
            return _of_kind(name, value, usual)
        if usual is ...:
            raise DomainError(f"config of type {self.kind!r} lacks the entry {name!r}")
        return usual

    def known(self, what: str) -> str | None:
        """What the family calls one of `NAMES`; None: its class has no such entry."""
        return next((name for name in NAMES[what] if name in self._defaults), None)

    def called(self, what: str) -> str:
        """The same; the usual name where its class has none."""
        return self.known(what) or NAMES[what][0]

    def has(self, name: str) -> bool:
        """Whether the config itself has the entry."""
        self.read.add(name)
        return self._given.get(name) is not None

    def null(self, name: str) -> bool:
        """Whether the config gives the entry as null."""
        self.read.add(name)
        return name in self._given and self._given[name] is None

    def replaced(self, **values: Any) -> Entries:
        """The same with other values of some entries, read and noted in one list with these."""
        found = copy.copy(self)
        found._given = {**self._given, **values}
        self.read.update(values)
        return found

    def number(self, name: str, default: Any = ...) -> float:
        """A real entry."""
        return float(_of_kind(name, self(name, default), 0.0))

    def count(self, name: str, default: Any = ...) -> int:
        """An entry that is a positive integer."""
        value = self(name, default)
        check_count(name, value)
        return int(value)

    def inside(self, name: str, usual: Any = None) -> Entries:
        """The entries of an object, none where it is left out; `usual` are their defaults."""
        given = _of_kind(name, self(name, {}), {})
        found = Entries(given, f"{self.kind}.{name}", usual or {})
        found.notes = self.notes
        self._objects[name] = found
        return found

    def several(self, name: str, like: Any, count: int | None = None) -> list[Any]:
        """A list of as many entries of the kind of `like`; empty where there is none."""
        given = _of_kind(name, self(name, []), [])
        if given and count not in (None, len(given)):
            raise domain_error(name, given, f"a list of {count}")
        return [_of_kind(f"{name}[{number}]", one, like) for number, one in enumerate(given)]

    def kinds(
        self,
        usual: Sequence[str],
        allowed: Collection[str] = (FULL, SLIDING),
        name: str = "layer_types",
    ) -> list[str]:
        """What every layer is, by the list of that name; the usual ones where there is none.

        Raises:
            DomainError: a kind that is not allowed, or another number of layers.
        """
        given = self.several(name, "") or list(usual)
        if len(given) != len(usual) or not set(given) <= set(allowed):
            words = f"{len(usual)} of {', '.join(map(repr, allowed))}"
            raise domain_error(name, given, words)
        return given

    def flag(self, name: str, default: Any = ...) -> bool:
        """An entry that is true or false."""
        return bool(_of_kind(name, self(name, default), False))

    def positive(self, name: str, default: Any = ...) -> float:
        """A real entry above zero."""
        value = self.number(name, default)
        if value <= 0:
            raise domain_error(name, value, "positive")
        return value

    def layers(self, name: str, default: Any = ...) -> int:
        """A number of layers: lists of one entry per layer are made of it."""
        value = self.count(name, default)
        if value > MOST_LAYERS:
            raise domain_error(name, value, f"at most {MOST_LAYERS}")
        return value

    def variance(self, name: str | None = None, default: Any = ...) -> float:
        """The square of a deviation; None: of that which most matrices have."""
        name = self.called("variance") if name is None else name
        value = self.number(name, default)
        if abs(value) > MOST_DEVIATION:
            raise domain_error(name, value, f"a standard deviation of at most {MOST_DEVIATION:g}")
        return value**2

    def texts(self, name: str) -> list[str]:
        """An entry that is a list of words, or these in one text with | between them."""
        given = self(name, None)
        if given is None or isinstance(given, str):
            return [word for word in (given or "").split("|") if word]
        if not isinstance(given, list | tuple) or not all(isinstance(w, str) for w in given):
            raise domain_error(name, given, "a list of texts")
        return list(given)

    def activation(self, name: str) -> str:
        """Our name of an activation function."""
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
        """Tokens per sequence: the most that entry `name` allows, unless fewer are asked for.

        Args:
            table: whether that many positions have a row of a table, so that more do not exist.
            default: as of an entry.
        """
        most = self(name, default)
        return self.at_most(check_count(name, most, least=2), seq_len, name, table)

    def at_most(self, most: int, seq_len: int | None, meaning: str, table: bool = True) -> int:
        """Tokens per sequence where something else than one entry limits them."""
        if seq_len is None:
            return most
        check_count("seq_len", seq_len)
        if table and seq_len > most:
            raise domain_error("seq_len", seq_len, f"at most {meaning} = {most}")
        return seq_len

    def padding(self) -> int | None:
        """The token whose row is zero; None where there is none in the table.

        A null in the config is no default: it says that there is none.
        """
        if self.null("pad_token_id"):
            return None
        token = self("pad_token_id", -1)
        table = isinstance(token, int) and 0 <= token < self.count("vocab_size")
        return token if table else None

    def biases(self, existing: tuple[str, ...]) -> Biases | None:
        """Biases that start at zero, on those matrices that have one; None where none has."""
        return Biases.of(*existing) if existing else None

    def cap(self, name: str, default: Any = ...) -> float | None:
        """An entry that is a positive number, or null where the config says so."""
        there = not self.null(name) and self(name, default) is not None
        return self.positive(name) if there else None

    def window(self, name: str, seq_len: int) -> int | None:
        """How many tokens attention reaches back; None where that is all of them.

        A null in the config is no default: it says that there is no window.
        """
        reach = None if self.null(name) else self(name, None)
        if reach is None:
            return None
        check_count(name, reach)
        return int(reach) if reach < seq_len else None

    def windows(
        self, kinds: Any, windowed: str, name: str, seq_len: int
    ) -> tuple[int | None, ...] | None:
        """Reach of every layer, where layers of the kind `windowed` have a window."""
        reach = self.window(name, seq_len)
        reaches = tuple(reach if kind == windowed else None for kind in kinds)
        return reaches if any(reaches) else None

    def labels(self) -> int:
        """Classes of a classification."""
        names = _of_kind("id2label", self("id2label", {}), {})
        return self.count("num_labels", len(names) or 2)

    def usual(self, name: str) -> Mapping[str, Any]:
        """What the family's class says of an object that is left out."""
        given: Mapping[str, Any] = self._defaults.get(name, {})
        return given

    def rope(self) -> Mapping[str, Any]:
        """`rope_parameters`, or the entry that preceded it."""
        given: Mapping[str, Any] = {}
        for name in ROTARY:
            value = self(name, {}) if self.has(name) else {}
            given = given or _of_kind(name, value, {})
        return given

    def rotary(
        self,
        base: str = "rope_theta",
        fraction: str = "partial_rotary_factor",
        scaled: tuple[str, ...] = (),
    ) -> Rotary:
        """Rotary positions, from `rope_parameters` or the entries that preceded it.

        Modules turn every feature, whatever is said of a part, unless their family's defaults have
        a `partial_rotary_factor`.

        Args:
            base, fraction: the family's names of those earlier entries.
            scaled: kinds of scaling that the family's reader itself takes into account.
        """
        usual = self._defaults.get("rope_parameters", {})
        given = self.rope()
        kind = given.get("rope_type", given.get("type", "default"))
        if kind != "default" and kind not in scaled:
            self.leave_out("rope_type", kind, "unscaled rotary frequencies are assumed")
        found = {}
        for name, old, otherwise in (
            ("rope_theta", base, 10000.0),
            ("partial_rotary_factor", fraction, 1.0),
        ):
            said = ((name, given.get(name)), (old, self(old, None)))
            numbers = [_of_kind(entry, value, 1.0) for entry, value in said if value is not None]
            found[name] = float(_first(*numbers, usual.get(name), otherwise))
        part = found["partial_rotary_factor"]
        if part != 1 and "partial_rotary_factor" not in usual:
            self.leave_out("partial_rotary_factor", part, "the module turns every feature")
            part = 1.0
        return Rotary(part, found["rope_theta"])

    def without(self, name: str, meaning: str) -> None:
        """Note a number that is 0 where nothing is left out."""
        if value := self.number(name):
            self.leave_out(name, value, meaning)

    def leave_out(self, name: str, value: Any, meaning: str) -> None:
        """Note an entry that switches on something that is not modelled."""
        self.read.add(name)
        self.notes.append(f"{name} = {brief(value)} is not modelled: {meaning}")

    def expect(self, name: str, usual: Any, meaning: str) -> None:
        """Note an entry whose value is not the only one that is modelled."""
        self.read.add(name)
        if (value := self._given.get(name, usual)) != usual:
            self.leave_out(name, value, meaning)

    def same_as(self, other: str, name: str) -> None:
        """Read a second entry for the same thing.

        Raises:
            DomainError: it says something else.
        """
        if self.has(other) and self.has(name) and self(other) != self(name):
            raise domain_error(
                other, self(other), f"{name} = {brief(self(name))}, which it repeats"
            )
        self.read.add(other)

    def refuse(self, name: str, usual: Any, feature: str) -> None:
        """Refuse an entry that switches on what no Transformer can express.

        Raises:
            DomainError: it does.
        """
        if (value := self(name, usual)) != usual:
            remedy = f"{feature} is outside what moments models"
            raise domain_error(name, value, f"{usual!r}", remedy)

    def finish(self, usual: Mapping[str, Any]) -> None:
        """Note every entry that nothing has read and that is not known to change nothing.

        Args:
            usual: entries of the family that are not modelled, with the value at which they change
                nothing.

        Raises:
            DomainError: an entry of another kind than the family's default.
        """
        known, (kind, *inner) = {**USUAL, **usual}, self.kind.split(".")
        for name, value in self._given.items():
            if name in IRRELEVANT or value is None:
                continue
            _of_kind(name, value, self._defaults.get(name))
            if name in ROTARY and isinstance(value, Mapping):
                self._turned(name, value)
            elif name in self._objects:
                self._objects[name].finish(usual)
            silent = name in known and (value == known[name] or known[name] is ...)
            if name not in self.read and not silent:
                why = "it is left out" if name in known else f"no entry of {kind!r} known here"
                path = ".".join((*inner, name))
                self.notes.append(f"{path} = {brief(value)} is not modelled: {why}")

    def _turned(self, path: str, given: Mapping[str, Any]) -> None:
        """Note what stands in an object of rotary entries, or in those of kinds of layers, and is
        none of those that its type of positions has."""
        scaled = str(given.get("rope_type") or given.get("type") or "default")
        known = f"{_TURNED} {_SCALED.get(scaled, '')}".split()
        for name, value in given.items():
            if isinstance(value, Mapping):
                self._turned(f"{path}.{name}", value)
            elif name not in known and value is not None:
                why = f"no entry of {scaled!r} positions known here"
                self.notes.append(f"{path}.{name} = {brief(value)} is not modelled: {why}")


# What an entry must be, by the kind of its default, and the same in words.
_KINDS: tuple[tuple[type, Any, str], ...] = (
    (bool, bool, "true or false"),
    (int, int, "an integer"),
    (float, (int, float), "a number"),
    (str, str, "a text"),
    (Mapping, Mapping, "a JSON object"),
    (list, (list, tuple), "a list"),
)


def _of_kind(name: str, value: Any, usual: Any) -> Any:
    """The value, checked to be of the same kind as the usual one; None and ... ask for none.

    Integers stand for numbers, and true for neither; every number is finite and within 64 bits.
    """
    for kind, allowed, words in _KINDS:
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
