"""Every entry that a family's config reader reads, at a second value, measured and predicted.

A reader that takes an entry for another than the module does is seen by no test of names. So for
each family a small module (2 layers, width 64, weights of variance 1/d) is measured as it is, and
again with one entry changed; the same two configs are declared and predicted on the same tokens.
All draws of a family share their seeds, so that the effect of an entry, the changed module's
moments over the unchanged one's, is known better than either.

    python benchmarks/config_options.py measure [--kinds bert t5] [--seeds 24]
    python benchmarks/config_options.py compare [--kinds bert t5]
    python benchmarks/config_options.py table                     # into docs/accuracy.md
    python benchmarks/config_options.py defaults [--kinds bert]   # what a missing entry means

`defaults` takes what transformers' config classes say of the entries that a reader reads.
`measure` keeps every draw in data/config_options.npz. `table` also writes what each changed entry
changes in the declaration, to which a test holds the readers.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
import warnings
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import records
import tables
from real_modules import QUANTITIES, Case

import moments
from moments.errors import DomainError, ValidityWarning
from moments.model.huggingface import FAMILIES, READERS
from moments.model.huggingface.entries import Entries
from moments.model.huggingface.sizes import _NEEDED, sized_config

NAME = "config_options"
READINGS = Path(__file__).parent / "data" / NAME / "readings.json"
LAYERS, WIDTH, HEADS, VOCAB, SEQ_LEN = 2, 64, 4, 500, 16
# Bounds that three standard errors are added to; correlations absolute, the others relative.
BOUNDS = {"variance": 0.02, "correlation": 0.02, "grad_variance": 0.06, "loss": 0.005}
STANDARD_ERRORS = 3.0

Changes = Mapping[str, Any]

# --- second values -------------------------------------------------------------------------------

_DROPOUT, _EPSILON, _ACTIVATION = 0.4, 0.05, "relu"
SECOND: dict[str, Any] = {
    "add_cross_attention": True,
    "alibi": True,
    "apply_residual_connection_post_layernorm": True,
    "attention_multiplier": 0.5,
    "attention_types": [[["local", "global"], 1]],
    "attn_logit_softcapping": 0.5,
    "clip_qkv": 1.0,
    "conv_kernel_size": 3,
    "d_kv": 8,
    "embedding_multiplier": 3.0,
    "feed_forward_proj": "gated-silu",
    "final_logit_softcapping": 0.5,
    "head_dim": 8,
    "image_size": 24,
    "initializer_factor": 0.5,
    "is_decoder": True,
    "logit_scale": 1.0,
    "logits_scaling": 4.0,
    "max_window_layers": 0,
    "num_channels": 1,
    "num_key_value_heads": 1,
    "num_kv_heads": 2,
    "num_labels": 7,
    "num_ln_in_parallel_attn": 1,
    "pad_token_id": 3,
    "partial_rotary_factor": 0.5,
    "patch_size": 16,
    "pos_att_type": ["c2p"],
    "position_embedding_type": "relative_key",
    "query_pre_attn_scalar": 4,
    "relative_attention_max_distance": 12,
    "relative_attention_num_buckets": 8,
    "residual_multiplier": 0.3,
    "rope_parameters": {"rope_theta": 10.0},
    "rope_theta": 10.0,
    "rotary_dim": 16,
    "rotary_emb_base": 10.0,
    "rotary_pct": 0.5,
    "sliding_window": 4,
    "type_vocab_size": 1,
    "use_bidirectional_attention": True,
    "window_size": 4,
}
for _names, _value in (
    (("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    (("intermediate_size", "ffn_dim", "hidden_dim", "d_ff", "n_inner", "ffn_hidden_size"), 128),
    (("embedding_size", "word_embed_proj_dim"), 32),
    (("initializer_range", "init_std"), 0.08),
):
    SECOND |= dict.fromkeys(_names, _value)

# Entries that mean something only beside others, or in several surroundings: (kind or "", entry) ->
# every surrounding to try it in, with its second value there where that is another.
_WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
_SMALL = {"initializer_range": 0.08}  # logits that are not divided by sqrt(d_head) stay moderate
_GROUPED = {"new_decoder_architecture": True}
BESIDE: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("", "layer_types"): [
        {**_WINDOWS, "layer_types": ["sliding_attention", "full_attention"]},
    ],
    ("gemma2", "layer_types"): [
        {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
    ],
    ("", "use_sliding_window"): [{"sliding_window": 4, "max_window_layers": 1}],
    ("", "max_window_layers"): [_WINDOWS],
    ("qwen2", "sliding_window"): [_WINDOWS],
    ("qwen3", "sliding_window"): [_WINDOWS],
    ("gpt2", "scale_attn_weights"): [_SMALL],
    ("t5", "feed_forward_proj"): [{}, {"feed_forward_proj": "gated-gelu"}],
    ("mt5", "feed_forward_proj"): [{}, {"feed_forward_proj": "relu"}],
    ("falcon", "attention_dropout"): [{}, {"alibi": True}, {"parallel_attn": False}],
    ("falcon", "hidden_dropout"): [{}, {"parallel_attn": False}],
    ("falcon", "num_kv_heads"): [_GROUPED],
    ("falcon", "num_ln_in_parallel_attn"): [_GROUPED],
    ("deberta-v2", "type_vocab_size"): [{"type_vocab_size": 2}],
    ("", "relative_attention_max_distance"): [{"relative_attention_num_buckets": 8}],
    ("", "pos_att_type"): [{"relative_attention": True}],
    ("bloom", "num_attention_heads"): [{"n_head": 2}],
    ("bloom", "n_head"): [{"num_attention_heads": 2}],
    ("", "rope_parameters"): [
        {},
        {"rope_parameters": {"rope_theta": 10.0, "partial_rotary_factor": 0.5}},
    ],
}

# Entries whose second value changes no number, each with the reason.
WITHOUT_EFFECT = {
    "attention_layers": "written by the config's class from attention_types",
    "dense_act_fn": "written by the config's class from feed_forward_proj",
    "is_gated_act": "written by the config's class from feed_forward_proj",
    "id2label": "names of the labels; num_labels is measured",
    "max_position_embeddings": "the most tokens; every text here is shorter",
    "n_positions": "the most tokens; every text here is shorter",
    "seq_length": "the most tokens; every text here is shorter",
    "max_relative_positions": "of DeBERTa's relative attention, which is named as left out",
    "norm_rel_ebd": "of DeBERTa's relative attention, which is named as left out",
    "position_buckets": "of DeBERTa's relative attention, which is named as left out",
    "share_att_key": "of DeBERTa's relative attention, which is named as left out",
    "relative_attention": "switches on pos_att_type, which is named as left out",
    "rope_scaling": "the older name of rope_parameters",
    "model_type": "the family itself",
}
# Sizes of tables of which only some rows are read: they move a draw, and no moment.
MOVING_DRAWS = {"type_vocab_size"}
# Sizes that `real_modules.py` measures at others: 6 and 24 layers, width 128 and the published one.
MEASURED_ELSEWHERE = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"),
    *("hidden_size", "n_embd", "dim", "d_model", "n_embed", "vocab_size"),
)


def second_values(kind: str, entry: str, config: Changes) -> list[dict[str, Any]]:
    """Every set of changes by which the entry is tried, the entry's own included."""
    around = BESIDE.get((kind, entry)) or BESIDE.get(("", entry)) or [{}]
    return [{entry: _second(entry, config), **beside} for beside in around]


def _second(entry: str, config: Changes) -> Any:
    """By the table, else by what its name and its first value say."""
    first = config.get(entry, FAMILIES[config["model_type"]].defaults.get(entry))
    if entry in SECOND:
        return SECOND[entry]
    if entry.endswith(("dropout", "pdrop", "dropout_prob", "dropout_rate")):
        return _DROPOUT
    if entry.endswith(("_eps", "_epsilon")):
        return _EPSILON
    if entry in ("hidden_act", "hidden_activation", "activation", "activation_function"):
        return "silu" if first == _ACTIVATION else _ACTIVATION
    if entry == "scale_attn_weights":
        return False
    return not bool(first)


# --- cases ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option(Case):
    """A family's small config with some entries changed.

    Attributes:
        changed: entries and their values as JSON; "{}": none.
    """

    changed: str = "{}"

    @classmethod
    def of(cls, kind: str, changes: Changes) -> Option:
        return cls(kind, LAYERS, "option", SEQ_LEN, changed=json.dumps(changes, sort_keys=True))

    @property
    def config(self) -> dict[str, Any]:
        return base_config(self.kind) | json.loads(self.changed)

    @property
    def name(self) -> str:
        return f"{self.kind} {self.changed}"


def base_config(kind: str) -> dict[str, Any]:
    """Small, with weights of variance 1/d, or less where logits are not divided by sqrt(d_head)."""
    config = sized_config(kind, LAYERS, WIDTH, heads=HEADS, vocab_size=VOCAB, seq_len=SEQ_LEN + 4)
    for name in ("initializer_range", "init_std"):
        if name in FAMILIES[kind].defaults:
            config[name] = WIDTH**-0.5
    if kind in ("gpt_neo", "granite"):
        config |= {"initializer_range": 0.08}
    return config


def entries_read(kind: str, changes: Changes) -> set[str]:
    """Names of the entries that the family's reader asks for."""
    entries = Entries(base_config(kind) | changes, kind, FAMILIES[kind].defaults)
    images = FAMILIES[kind].task == "images"
    FAMILIES[kind].read(entries, None if images else SEQ_LEN)
    return set(entries.read)


def declared(config: Changes) -> tuple[moments.Transformer | None, str]:
    """The declaration of a config, and what it says of entries that it does not model.

    None where it is refused.
    """
    images = FAMILIES[config["model_type"]].task == "images"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = moments.from_huggingface(dict(config), seq_len=None if images else SEQ_LEN)
    except DomainError as error:
        return None, str(error)
    return model, "\n".join(str(w.message) for w in caught)


def is_named(kind: str, entry: str, changes: Changes) -> bool:
    """Whether the declaration refuses the changed entry, or names it as not modelled."""
    model, said = declared(base_config(kind) | changes)
    return model is None or f"{entry} = " in said


def options(kind: str) -> dict[str, list[dict[str, Any]]]:
    """Every entry that some config of the family makes its reader read -> changes to try."""
    known = entries_read(kind, {})
    found: dict[str, list[dict[str, Any]]] = {}
    spared = {*WITHOUT_EFFECT, *MEASURED_ELSEWHERE}
    while left := sorted(known - set(found) - spared):
        for entry in left:
            found[entry] = second_values(kind, entry, base_config(kind))
            for changes in found[entry]:
                if declared(base_config(kind) | changes)[0] is not None:
                    known |= entries_read(kind, changes)
    return found


def measurable(kind: str) -> Iterator[tuple[str, Option]]:
    """Every case that is measured, with the entry that it is about; "" where nothing changes."""
    yield "", Option.of(kind, {})
    for entry, tried in options(kind).items():
        for changes in tried:
            if not is_named(kind, entry, changes):
                yield entry, Option.of(kind, changes)


# --- measurement ---------------------------------------------------------------------------------


@functools.cache
def _stored() -> dict[str, Any]:
    return records.load(NAME) if records.exists(NAME) else {}


def stored(kind: str) -> dict[str, Any]:
    return dict(_stored().get(kind, {}))


def measure_kind(kind: str, seeds: int, only: Collection[str] = ()) -> None:
    """Bring every case of a family, or those of some changes, to at least that many draws."""
    import transformers

    from moments.torch import measure
    from moments.torch.huggingface_modules import build_module

    transformers.logging.set_verbosity_error()
    found, start = stored(kind), time.perf_counter()
    first = 1000 * (zlib.crc32(kind.encode()) % 1_000_000)
    for _, case in measurable(kind):
        done = found.get(case.changed, {}).get("seeds", 0)
        if done >= seeds or (only and case.changed not in only):
            continue
        config, data = case.config, case.data()
        try:
            m = measure(lambda s, c=config: build_module(c, s), data, seeds=seeds, seed=first)
        except Exception as error:  # what the real module does not take is a finding
            found[case.changed] = {"seeds": seeds, "error": f"{type(error).__name__}: {error}"}
            print(case.name, found[case.changed]["error"], flush=True)
            continue
        record = _slim(m) | {"seeds": seeds, "loss": [m.loss, m.loss_stderr]}
        if m.encoder is not None:
            record["encoder"] = _slim(m.encoder)
        found[case.changed] = record
    records.save(NAME, _stored() | {kind: found})
    _stored.cache_clear()
    print(f"{kind}: {len(found)} cases, {time.perf_counter() - start:.0f} s", flush=True)


def _slim(m: Any) -> dict[str, Any]:
    names = sorted({row["weight"] for row in m.weight_gradient_rows})
    return {name: np.asarray(m.samples[name]) for name in QUANTITIES} | {"parameters": names}


# --- comparison ----------------------------------------------------------------------------------


class Error(NamedTuple):
    """One number's error and its standard error, relative but for correlations.

    `where` is "stream 2", "encoder 0", ..., or the same of an "effect": the changed case's moments
    over the unchanged one's, predicted against measured in the same draws.
    """

    quantity: str
    where: str
    value: float
    stderr: float

    @property
    def outside(self) -> float:
        """What its bound and its standard errors leave of it."""
        return abs(self.value) - STANDARD_ERRORS * self.stderr - BOUNDS[self.quantity]


class Compared(NamedTuple):
    """One case.

    Attributes:
        entry: what it is about; "" for the unchanged config.
        case: its config.
        errors: of every quantity the one that is farthest outside, or least inside.
        problems: what else is wrong, in words.
    """

    entry: str
    case: Option
    errors: tuple[Error, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[str, ...]:
        found = (
            f"{e.quantity} {100 * e.value:+.1f} ± {100 * e.stderr:.1f} % ({e.where})"
            for e in self.errors
            if e.outside > 0
        )
        return (*found, *self.problems)


def compare_kind(kind: str, only: Collection[str] | None = None) -> Iterator[Compared]:
    """Every stored case of a family against its prediction, or those of some changes and "{}"."""
    found, first = stored(kind), None
    for entry, case in measurable(kind):
        if only is not None and case.changed not in only:
            continue
        record = found.get(case.changed)
        if record is None or "error" in record:
            problem = "not measured" if record is None else f"the module: {record['error']}"
            yield Compared(entry, case, problems=(problem,))
            continue
        prediction = _predicted(case)
        first = first or prediction
        base = found["{}"] if entry else None
        worst: dict[str, Error] = {}
        for error in _errors(prediction, record, first, base):
            known = worst.get(error.quantity)
            if known is None or error.outside > known.outside:
                worst[error.quantity] = error
        problems = _names(prediction, record)
        if base is not None:
            problems += _misread(case, record, base)
        yield Compared(entry, case, tuple(worst.values()), tuple(problems))


def _predicted(case: Option) -> moments.Prediction:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValidityWarning)
        return case.predicted()


def _draws(record: Changes, name: str) -> np.ndarray:
    """(draws, N + 1)."""
    return np.reshape(record[name], (-1, LAYERS + 1))


def _errors(p: Any, record: Any, p0: Any, base: Any) -> Iterator[Error]:
    """Of every number of one case."""
    stacks = [("stream", p, record, p0, base)]
    if "encoder" in record:
        rest = (p0.encoder, None if base is None else base["encoder"])
        stacks.append(("encoder", p.encoder, record["encoder"], *rest))
    for stack, prediction, measured, other, unchanged in stacks:
        for name in QUANTITIES:
            value = np.asarray(getattr(prediction, name), dtype=float)
            draws, relative = _draws(measured, name), name != "correlation"
            yield from _each(name, stack, value, draws, relative)
            if unchanged is not None:
                before = np.asarray(getattr(other, name), dtype=float)
                both = min(len(draws), len(_draws(unchanged, name)))
                draws, drawn = draws[:both], _draws(unchanged, name)[:both]
                if relative:
                    # The error of a ratio of means, to first order in either's.
                    value, draws = value / before, draws / drawn.mean(0)
                    draws = draws - draws.mean(0) * (drawn / drawn.mean(0) - 1)
                else:
                    value, draws = value - before, draws - drawn
                yield from _each(name, f"effect {stack}", value, draws, relative)
    if record["loss"][0] is not None:
        loss, stderr = record["loss"]
        yield Error("loss", "", float(p.loss / loss - 1), float(stderr / loss))


def _each(
    name: str, where: str, value: np.ndarray, draws: np.ndarray, relative: bool
) -> Iterator[Error]:
    mean, stderr = draws.mean(0), draws.std(0, ddof=1) / math.sqrt(len(draws))
    scale = mean if relative else np.ones_like(mean)
    for n, (e, s) in enumerate(zip((value - mean) / scale, stderr / scale, strict=True)):
        yield Error(name, f"{where} {n}", float(e), float(s))


def _misread(case: Option, record: Any, base: Any) -> list[str]:
    """A declaration that changes where no draw of the module does, or the other way round."""
    stacks = [(record, base)]
    if "encoder" in record:
        stacks.append((record["encoder"], base["encoder"]))
    pairs = [[_draws(one, name) for one in stack] for stack in stacks for name in QUANTITIES]
    still = all(np.array_equal(a[: len(b)], b[: len(a)]) for a, b in pairs)
    changed = moving(reading(case))
    if still and changed:
        return [f"the module does not read it, the declaration does: {', '.join(changed)}"]
    if not still and not reading(case) and not MOVING_DRAWS & set(json.loads(case.changed)):
        return ["the module reads it, the declaration does not"]
    return []


def reading(case: Option) -> dict[str, Any]:
    """What the changed entries change in the declaration, by the path of the field."""
    before, after = (declared(config)[0] for config in (base_config(case.kind), case.config))
    assert before is not None
    assert after is not None
    return _difference(before.to_dict(), after.to_dict())


def _difference(before: Any, after: Any, path: str = "") -> dict[str, Any]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        found = {}
        for name in sorted({*before, *after}):
            inner = f"{path}.{name}" if path else name
            found |= _difference(before.get(name), after.get(name), inner)
        return found
    return {} if before == after else {path: after}


def write_readings() -> None:
    """Keep what every changed entry changes in the declaration."""
    found = {
        kind: {case.changed: reading(case) for _, case in measurable(kind)}
        for kind in sorted(FAMILIES)
    }
    READINGS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def moving(fields: Changes) -> list[str]:
    """Those that move a stream.

    Which parameters there are, at zero or one, moves none; the padding token's row of zeros does
    where the text has that token.
    """
    still = ("norm_affine", "norm_bias", "biases", "head.bias", "embedding.padding_id")
    return [name for name in fields if not name.removeprefix("encoder.").startswith(still)]


def _names(p: Any, record: Any) -> list[str]:
    """Parameters that are predicted and not there, or there and not predicted."""
    found = []
    for stack, own in (("", record), ("encoder.", record.get("encoder"))):
        if own is not None:
            rows = (p.encoder if stack else p).weight_gradients().itertuples()
            wrong = sorted({row.weight for row in rows} ^ set(own["parameters"]))
            # The table that both stacks read is measured with the decoder.
            shared = {"token"} if stack else set()
            found += [f"parameters: {stack}{name}" for name in wrong if name not in shared]
    return found


def print_comparison(kinds: list[str]) -> None:
    for kind in kinds:
        start = time.perf_counter()
        for row in compare_kind(kind):
            mark = "FAILS" if row.failures else "ok"
            errors = "  ".join(
                f"{e.quantity} {e.value:+.3f}({e.stderr:.3f}) {e.where}" for e in row.errors
            )
            print(f"{mark:<6}{row.case.name}: {'; '.join(row.failures) or errors}", flush=True)
        print(f"{kind}: {time.perf_counter() - start:.0f} s", flush=True)


# Why a case is outside its bounds, where that is known: family, entry -> reason.
KNOWN: dict[tuple[str, str], str] = {
    **dict.fromkeys(
        ((kind, "pad_token_id") for kind in ("camembert", "roberta", "xlm-roberta")),
        "a text that has the padding token, and no mask that leaves it out: the module gives it no"
        " position either",
    ),
    ("distilbert", "sinusoidal_pos_embds"): "transformers 5 leaves the fixed table trainable",
    **dict.fromkeys(
        (("mt5", ""), ("mt5", "d_ff"), ("mt5", "initializer_factor")),
        "the encoder's gradients are low where a tied head does not scale its input",
    ),
    ("phi", "qk_layernorm"): "gradients of these norms' biases are not predicted",
}


def table() -> None:
    """Predict every stored case: how many are inside, and those outside; write the readings."""
    every = [row for kind in sorted(FAMILIES) for row in compare_kind(kind)]
    write_readings()
    outside = [row for row in every if row.failures]
    lines = [
        (
            f"{row.case.kind} `{row.case.changed}`",
            "; ".join(row.failures),
            KNOWN.get((row.case.kind, row.entry), "not known"),
        )
        for row in outside
    ]
    tables.put(
        "accuracy",
        "config-options",
        f"{len(every) - len(outside)} of {len(every)} cases are inside. Outside:",
        tables.markdown(("module, change", "error", "why"), lines, words=3),
    )


DEFAULTS = Path(moments.__file__).parent / "model/huggingface/defaults.json"


def write_defaults(kinds: Collection[str]) -> None:
    """What transformers' classes say of the stored entries; of a new kind, of all that are read."""
    from transformers import AutoConfig

    stored = json.loads(DEFAULTS.read_text())
    for kind in kinds:
        said = AutoConfig.for_model(kind).to_dict()
        known = stored.get(kind)
        if known is None:
            entries = Entries(said, kind, {})
            READERS[kind].read(entries.replaced(**_NEEDED.get(kind, {})), None)
            known = {name: said.get(name) for name in sorted(entries.read - {"model_type"})}
            sizes = "hidden_size", "num_hidden_layers", "num_attention_heads"
            wide = {k: 2 * said[k] for k in sizes if k in said}
            other = AutoConfig.for_model(kind, **wide).to_dict()
            same = {name for name in known if said.get(name) == other.get(name)}
            known = {name: was for name, was in known.items() if name in same | wide.keys()}
        # A null is what the class makes of other entries; of an object what is read is kept; JSON
        # has no infinity, which readers take for none.
        known = {name: was for name, was in known.items() if "Infinity" not in json.dumps(was)}
        found = {name: was if said.get(name) is None else said[name] for name, was in known.items()}
        for name, was in known.items():
            if isinstance(was, dict) and isinstance(found[name], dict):
                found[name] = {key: found[name][key] for key in was}
        stored[kind] = {name: value for name, value in found.items() if value is not None}
    DEFAULTS.write_text(written_defaults(stored))


def written_defaults(stored: Mapping[str, Mapping[str, Any]]) -> str:
    """As JSON, in lines of up to 100 characters for each kind."""
    result = []
    for kind, known in stored.items():
        lines = [" "]
        for name, value in known.items():
            entry = f" {json.dumps(name)}: {json.dumps(value, allow_nan=False)},"
            if len(lines[-1] + entry) > 100:
                lines.append(" ")
            lines[-1] += entry
        result.append("\n".join((f" {json.dumps(kind)}: {{", *lines)).rstrip(",") + "\n }")
    return "{\n" + ",\n".join(result) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("measure", "compare", "table", "defaults"))
    parser.add_argument("--kinds", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--only", nargs="*", default=[], help="changes, as `compare` prints them")
    given = parser.parse_args()
    kinds = given.kinds or sorted(FAMILIES)
    if given.action == "measure":
        for kind in kinds:
            measure_kind(kind, given.seeds, given.only)
    elif given.action == "compare":
        print_comparison(kinds)
    elif given.action == "defaults":
        write_defaults(kinds)
    else:
        table()


if __name__ == "__main__":
    main()
