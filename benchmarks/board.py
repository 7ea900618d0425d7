"""Every model type that transformers ships, built small, described, predicted, measured, checked.

    nice python benchmarks/board.py run [--kinds clip_text_model ...] [--again] [--limit 30]
    python benchmarks/board.py show            # what is stored, a line each type
    python benchmarks/board.py table           # its counts, into docs/accuracy.md

A type's own config class gives the config, which SIZES shrinks by the names of its entries alone;
nothing here knows a model. transformers' auto classes say which module goes with it, and
`moments.check` reads it (a family's reader where there is one, else one pass through it), predicts
it, measures it on random input and looks for faults; what is no Transformer is followed by its
operations. Where that fails too, the reason is kept. `redrawn` runs the module's own initialiser
once more, part by part, and holds the tensors against those that it was built with.

Every type runs in a child process with a limit of time and of memory, so that one that crashes
costs a row. Rows are stored in data/board.npz as they come, and a run goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import math
import multiprocessing
import platform
import re
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import records
import tables
import torch
import transformers
from rich.progress import track
from transformers.models.auto import configuration_auto, modeling_auto

import moments
from moments.model.huggingface import FAMILIES
from moments.torch.architecture import promised_by
from moments.torch.dataflow.reading import recorded

NAME = "board"
JUDGED = Path(__file__).parent / "data/board_judged.json"
"""What was made of every finding by hand: type -> kind -> [verdict, why]."""

SECONDS, MEMORY = 60, 5 << 30
"""Of one type: processor time, and memory beyond what the libraries take."""


# --- configs --------------------------------------------------------------------------------------

WIDTH, HEADS, LAYERS, VOCABULARY = 256, 4, 2, 128


def at_most(limit: int) -> Callable[[int], int]:
    return lambda value: min(value, limit)


def key_heads(value: int) -> int:
    return value if value <= 2 else HEADS // 2


def exactly(number: int) -> Callable[[int], int]:
    return lambda _: number


Rules = tuple[tuple[str, Callable[[int], int]], ...]

SIZES: Rules = (
    # What looks like a size and is a choice
    (r"(pad|bos|eos|sep|cls|mask|unk)_token_id|.*_token_type|num_labels|type_vocab_size", int),
    (r".*(stride|kernel|dilation|padding|channels_in|num_channels|in_chans|in_channels).*", int),
    # Tokens
    (
        r".*vocab_size.*|.*group_vocab|.*num_embeddings|.*codebook_size|n_vocab|.*vocab_sizes",
        at_most(VOCABULARY),
    ),
    (
        r".*(max_.*position|max_seq|max_source|max_target|n_positions|n_ctx|seq_len|block_size).*",
        at_most(64),
    ),
    (
        r".*(sliding_window|attention_window|window_size|local_attention|chunk_size|chunk_len).*",
        at_most(16),
    ),
    (r"max_length", at_most(128)),
    # Depth
    (r".*(num_kv_shared_layers|num_nextn_predict_layers|num_mtp).*", exactly(0)),
    (r".*feat_extract_layers", int),
    (r".*(first_k_dense|num_hash_layers|num_dense|n_dense).*", at_most(1)),
    (r".*(period|_interval|_every_n.*|_frequency)", at_most(2)),
    (r".*(layer_offset)", at_most(1)),
    (r".*(layers|n_layer|layer_num|depth|depths|num_blocks|n_blocks|num_stages)", at_most(LAYERS)),
    # Heads and experts
    (
        r".*(key_value_heads|kv_heads|head_kv|num_kv|query_groups|multi_query_group_num).*",
        key_heads,
    ),
    (r".*(mamba|ssm|linear|conv|gdn|rwkv).*heads.*", at_most(HEADS)),
    (r".*(n_groups?|ngroups|topk_group|n_group|num_expert_group)", at_most(1)),
    (r".*(num_experts_per|experts_per_tok|top_?k|num_selected|moe_k).*", at_most(2)),
    (r".*experts.*", at_most(4)),
    (r".*(heads|n_head|heads_per.*)", at_most(HEADS)),
    # Widths
    (r"mamba_(d_head|head_dim)|ssm_head_dim", exactly(2 * WIDTH // HEADS)),
    (r"expand", at_most(1)),
    (r"mamba_d_ssm", at_most(2 * WIDTH)),
    (
        r".*(head_dim|head_size|head_width|d_kv|qkv_dim|kv_channels|v_dim|qk_.*_dim)",
        at_most(WIDTH // HEADS),
    ),
    (r".*rotary_dim.*", at_most(WIDTH // HEADS // 2)),
    (r".*query_pre_attn_scalar", at_most(WIDTH // HEADS)),
    (r".*(lora_rank|lora_dim|_rank|dt_rank|time_step_rank)", at_most(16)),
    (r".*(state_size|d_state|ssm_state|conv_dim_.*)", at_most(16)),
    (
        r".*(intermediate|ffn|feed_?forward|mlp|d_ff|dff|inner|hidden_dim|n_inner).*",
        at_most(4 * WIDTH),
    ),
    (
        r".*(hidden_size|hidden_sizes|d_model|d_embed|n_embd|embed_dim.*|embedding_size|dim|width)",
        at_most(WIDTH),
    ),
    (r".*(projection_dim|proj_dim|_dim|_size_per_head|embed_proj_dim|channels)", at_most(WIDTH)),
    # Pictures and sounds
    (r".*(image_size|img_size|input_size|crop_size|resolution)", at_most(32)),
    (r".*patch_size", at_most(8)),
    (r".*(num_frames|tubelet_size)", at_most(4)),
    (r".*(num_mel_bins|n_mels|feature_size|input_feat.*)", at_most(16)),
    (r".*(num_queries|num_latents|num_query_tokens|num_.*_tokens|mm_tokens.*)", at_most(8)),
)
"""Names of entries, and what a number under them becomes; the first that fits."""

COUNTS: Rules = (
    *SIZES[:1],
    *SIZES[2:3],
    (r".*(num_kv_shared_layers|num_nextn_predict_layers|num_mtp).*", exactly(0)),
    (r".*feat_extract_layers|.*pool.*|.*stages.*", int),
    (r".*(first_k_dense|num_hash_layers|num_dense|n_dense).*", at_most(1)),
    (r".*(period|_interval|_every_n.*|_frequency)", at_most(2)),
    (r".*(layer_offset)", at_most(1)),
    (r".*(layers|n_layer|layer_num|depth|depths|num_blocks|n_blocks)", at_most(LAYERS)),
    (r".*(n_groups?|ngroups|topk_group|n_group|num_expert_group)", at_most(1)),
    (r".*(num_experts_per|experts_per_tok|num_selected|moe_k|moe_top_?k).*", at_most(2)),
    (r".*experts.*", at_most(4)),
)
"""Where the widths of a class fit each other alone: vocabulary, depth and experts."""

FOLLOWING = (
    "out_features",
    "out_indices",
    "stage_names",
    "hidden_size_per_layer_input",
    "image_embedding_size",
)
"""Entries that follow from others, or that only some sizes allow, left to the class."""

FILLED = {"head_dim": WIDTH // HEADS, "pad_token_id": 0, "vocab_size": VOCABULARY}
"""Entries that a class may leave open though its module does not."""

OPEN = {
    "num_key_value_heads": HEADS // 2,
    "num_experts_per_tok": 2,
    "image_token_id": VOCABULARY - 1,
    "image_token_index": VOCABULARY - 1,
    "prediction_length": 8,
}
"""The same, of classes that fill most of them themselves."""

PICTURES: Rules = ((r".*(image_size|img_size|input_size|crop_size|resolution)", at_most(64)),)

TRIES: tuple[tuple[Rules, dict[str, int]], ...] = (
    (SIZES, FILLED),
    (SIZES, FILLED | OPEN),
    (PICTURES + COUNTS, FILLED | OPEN),
    (COUNTS, FILLED | OPEN),
)
"""Ways to a small config; the first whose module is built and runs on random input."""


def shrunk(
    entries: dict[str, Any], sizes: Rules = SIZES, filled: Mapping[str, int] = FILLED
) -> dict[str, Any]:
    """A config's entries, and those of configs in it, at a small size."""
    follow = (*FOLLOWING, "intermediate_size") if "expand" in entries else FOLLOWING
    entries = {name: value for name, value in entries.items() if name not in follow}
    depth = next(
        (v for k, v in entries.items() if re.fullmatch(DEPTH, k) and isinstance(v, int)), None
    )
    made = {}
    for name, value in entries.items():
        if isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
            made[name] = {k: v for k, v in value.items() if int(k) < LAYERS}
        elif isinstance(value, dict) and (name.endswith("config") or "model_type" in value):
            made[name] = shrunk(value, sizes, filled)
        elif isinstance(value, dict) and sizes is SIZES and "mrope_section" in value:
            made[name] = value | {"mrope_section": _sections(entries, value["mrope_section"])}
        elif _repeats(value):  # [[kinds of layers, how often]], as GPT-Neo has it
            made[name] = [[kinds, max(1, LAYERS // len(kinds))] for kinds, _ in value[:1]]
        elif isinstance(value, list) and depth is not None and len(value) == depth > LAYERS:
            made[name] = cut(value)
        else:
            made[name] = sized(name, value, sizes)
    if sizes is SIZES and {"window_size", "image_size", "patch_size"} <= made.keys():
        made["window_size"] = _alike(made["window_size"], 2)  # no more than what merging leaves
        patch = max(_leaves(made["patch_size"]), default=1)
        made["image_size"] = _alike(made["image_size"], 16 * patch)
    heads = [v for n, v in entries.items() if re.fullmatch(r"(num_attention|n|num)_heads?", n)]
    for name, value in entries.items():
        if "key_value_heads" in name and value in heads and type(value) is int:
            made[name] = min(value, HEADS) if sizes is SIZES else value
        elif value is None and name in filled:
            made[name] = filled[name]
    tokens = [n for n, v in made.items() if n.endswith(("token_id", "token_index", "_id"))]
    for place, name in enumerate(n for n in tokens if isinstance(made[n], int)):
        if made[name] >= VOCABULARY:
            made[name] = VOCABULARY - 1 - place
    return made


def _leaves(value: Any) -> list[int]:
    return [n for n in (value if isinstance(value, list | tuple) else [value]) if n]


def _alike(value: Any, number: int) -> Any:
    """So many numbers as it was, each that one."""
    return type(value)(number for _ in value) if isinstance(value, list | tuple) else number


def _sections(entries: dict[str, Any], sections: list[int]) -> list[int]:
    """Parts of a head that rotate by time, height and width, in a head of another width."""
    heads = next(
        (v for n, v in entries.items() if re.fullmatch(r"(num_attention|n|num)_heads?", n)), HEADS
    )
    width = entries.get("head_dim") or entries.get("hidden_size", WIDTH) // heads
    return [max(1, n * (WIDTH // HEADS) // width) for n in sections]


def _repeats(value: Any) -> bool:
    rows = value if isinstance(value, list) else [value]
    return all(
        isinstance(r, list) and len(r) == 2 and isinstance(r[0], list) and type(r[1]) is int
        for r in rows
    ) and bool(rows)


DEPTH = r"(text_)?(num_(hidden_)?layers|n_layers?|encoder_layers)"


def cut(kinds: list[Any]) -> list[Any]:
    """Of what a list says layer by layer as many as are left, every kind among them."""
    keys = [json.dumps(kind, sort_keys=True, default=str) for kind in kinds]
    firsts = sorted(keys.index(key) for key in dict.fromkeys(keys))[:LAYERS]
    more = [n for n in range(len(kinds)) if n not in firsts]
    return [kinds[n] for n in sorted([*firsts, *more[: LAYERS - len(firsts)]])]


def sized(name: str, value: Any, sizes: Rules = SIZES) -> Any:
    if isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
        return type(value)(sized(name, v, sizes) for v in value)
    if type(value) is not int:
        return value
    rule = next((to for pattern, to in sizes if re.fullmatch(pattern, name)), None)
    return value if rule is None else rule(value)


TASKS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_MASKED_LM",
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_IMAGE_CLASSIFICATION",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "MODEL_FOR_PRETRAINING",
    "MODEL",
)
"""The auto classes' maps, whose first one that has a type says what is built."""


def module_classes() -> dict[str, list[str]]:
    """Types for which an auto class names a module -> their modules' classes, likeliest first."""
    found = {kind: [entry.module] for kind, entry in FAMILIES.items()}
    for task in TASKS:
        names = getattr(modeling_auto, f"{task}_MAPPING_NAMES")
        for kind in configuration_auto.CONFIG_MAPPING_NAMES:
            name = names.get(kind)
            name = name[0] if isinstance(name, list | tuple) else name
            if name is not None:
                found.setdefault(kind, []).append(name)
    return found


def config_of(kind: str, sizes: Rules = SIZES, filled: Mapping[str, int] = FILLED) -> Any:
    cls = transformers.CONFIG_MAPPING[kind]
    entries = cls().to_dict()
    for name in ("transformers_version", "_name_or_path", "architectures", "dtype"):
        entries.pop(name, None)
    config = cls.from_dict(shrunk(entries, sizes, filled))
    config.use_cache = False
    if getattr(config, "is_encoder_decoder", False):
        start = getattr(config, "decoder_start_token_id", None)
        config.decoder_start_token_id = 0 if start is None else start  # T5 leaves it to its users
    return config


def built(kind: str, seed: int = 0) -> torch.nn.Module:
    """A small module of a type, drawn by its own initialisation: the first that runs, else the
    first that can be built."""
    why: Exception | None = None
    first: torch.nn.Module | None = None
    for sizes, filled in TRIES:
        for name in dict.fromkeys(module_classes()[kind]):
            try:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed)
                    cls = getattr(transformers, name)
                    module: torch.nn.Module = cls(config_of(kind, sizes, filled))
            except Exception as error:  # another library, over a config that it may not mean
                why = why or error
                continue
            with contextlib.suppress(moments.MomentsError):  # no random input suits it
                recorded(module, None)
                return module
            first = first or module
            break
    if first is None:
        assert why is not None
        raise why
    return first


# --- one type -------------------------------------------------------------------------------------


def redrawn(module: torch.nn.Module) -> list[str]:
    """Tensors that the module's own initialiser, run part by part, draws otherwise than they are.

    transformers draws every tensor once, whoever comes first; this runs what every class says of
    itself in the order of the tree, the whole last, and lets later words count.
    """
    again = copy.deepcopy(module)
    for held in [*again.modules(), *again.parameters(), *again.buffers()]:
        if hasattr(held, "_is_hf_initialized"):
            held._is_hf_initialized = False
    kept = {name: p.detach().clone() for name, p in module.named_parameters()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for part in _deepest_first(again):
            for held in [*again.modules(), *again.parameters()]:
                if getattr(held, "_is_hf_initialized", False):
                    held._is_hf_initialized = False
            owner = _initialiser(again, part)
            owner._init_weights(part)
    found: dict[str, list[float]] = {}
    for name, tensor in again.named_parameters():
        before, after = (float(t.double().square().mean()) for t in (kept[name], tensor.detach()))
        noise = math.sqrt(2 / tensor.numel())
        if min(before, after) == 0.0:
            apart = before != after
        else:
            apart = abs(math.log(after / before)) > max(8 * noise, 0.02)
        if apart:
            pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
            found.setdefault(pattern, []).append(after / before if before else math.inf)
    return [f"{name}: {np.mean(ratios):.3g} times" for name, ratios in found.items()]


def _deepest_first(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        yield from _deepest_first(child)
    yield module


def _initialiser(module: torch.nn.Module, part: torch.nn.Module) -> Any:
    """The innermost pretrained model around a part, whose word counts for it."""
    around = [
        p
        for p in module.modules()
        if hasattr(p, "_init_weights") and any(q is part for q in p.modules())
    ]
    return around[-1]


def row(kind: str) -> dict[str, Any]:
    """What is found of one type."""
    started = time.process_time()
    found: dict[str, Any] = {"module": module_classes()[kind][0]}
    try:
        module = built(kind)
    except Exception as error:  # another library, over a config that it may not mean
        return found | {"not built": _line(error)}
    found["module"] = type(module).__name__
    found["parameters"] = sum(p.numel() for p in module.parameters())
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            found["redrawn"] = redrawn(module)
        except Exception as error:  # the same
            found["redrawn"] = [f"not run again: {_line(error)}"]
        try:
            report = moments.check(module)
        except moments.MomentsError as error:
            said = _line(str(error).partition("\n")[0].partition("; found ")[0])
            found["not run" if " could not be run (" in said else "refused"] = said
            found["findings"] = _told(getattr(error, "findings", ()))
        except Exception as error:  # a defect here, that the table shows
            found["broken"] = _line(error)
        else:
            found |= _reported(module, report)
    found["seconds"] = round(time.process_time() - started, 1)
    return found


def _line(error: Exception | str) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    name = "" if isinstance(error, str) else f"{type(error).__name__}: "
    return (name + said)[:400]


def _told(findings: Iterable[Any]) -> list[dict[str, Any]]:
    names = {"severity": "severity", "kind": "kind", "where": "parameters", "reason": "reason"}
    return [{key: getattr(finding, name) for name, key in names.items()} for finding in findings]


def _reported(module: torch.nn.Module, report: moments.Report) -> dict[str, Any]:
    """A report's findings, and how far the prediction is off the measurement."""
    said = {
        "scheme": report.scheme,
        "findings": _told(report.findings),
        "notes": list(report.notes),
        "unchecked": list(report.unchecked),
    }
    if report.comparison is None:  # followed by operations, of which some may not have been
        whole = not any(words.startswith("what stands behind") for words in report.unchecked)
        errors = {
            name: {"ratio": _worst(row for row in report.rows if row.quantity == quantity)}
            for name, quantity in (
                ("variance", "mean square"),
                ("grad_variance", "gradient variance"),
            )
        }
        return {"read by": "operations" if whole else "operations in part", "errors": errors} | said
    frame = report.comparison.points()
    errors = {}
    for quantity, part in frame.groupby("quantity"):
        error = np.log(part["predicted"] / part["measured"])
        worst = int(np.nanargmax(np.abs(error.to_numpy())))
        errors[str(quantity)] = {
            "ratio": _digits(math.exp(error.iloc[worst])),
            "deviations": _digits(float(part["deviations"].abs().max())),
        }
    outputs = report.comparison.outputs().set_index("quantity")
    if "loss" in outputs.index:
        errors["loss"] = {
            "ratio": _digits(outputs.loc["loss", "predicted"] / outputs.loc["loss", "measured"])
        }
    return {
        "read by": "family" if promised_by(module) is not None else "dataflow",
        "errors": errors,
    } | said


def _worst(rows: Iterable[Any]) -> float | None:
    """Predicted over measured, at the row where they are farthest apart."""
    ratios = [1 / row.ratio for row in rows if row.passed is not None and 0 < row.ratio < math.inf]
    return _digits(max(ratios, key=lambda ratio: abs(math.log(ratio)))) if ratios else None


def _digits(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


# --- all types ------------------------------------------------------------------------------------


def _child(kind: str, pipe: Any) -> None:
    """In a process of its own, so that what it takes is given back."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY,) * 2)
    spent = math.ceil(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (spent + SECONDS,) * 2)
    pipe.send(row(kind))


def in_a_process(kind: str) -> dict[str, Any]:
    """`row`, under its limits; a row that says how it ended where it did not come back."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(kind, theirs))
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv() if ours.poll(20 * SECONDS) else {}
    except EOFError:
        found = {}
    process.kill()
    process.join()
    ended = {-24: f"{SECONDS} s of processor time were not enough", -9: "it did not end"}
    said = ended.get(process.exitcode or 0, f"the process ended with {process.exitcode}")
    return found or {"module": module_classes()[kind][0], "broken": said}


def stored() -> dict[str, Any]:
    return records.load(NAME) if records.exists(NAME) else {"rows": {}}


def run(kinds: list[str], again: bool, limit: int | None) -> None:
    """Types not yet stored, or all of those named."""
    data = stored()
    waiting = [kind for kind in kinds if again or kind not in data["rows"]][:limit]
    data["types"] = len(module_classes())
    data["versions"] = {
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
        "machine": platform.machine(),
    }
    for kind in track(waiting, "types", disable=not sys.stderr.isatty()):
        found = data["rows"][kind] = in_a_process(kind)
        records.save(NAME, data)
        print(f"{kind}: {state(found)}", flush=True)


STATES = ("not built", "not run", "broken", "refused")


def state(found: dict[str, Any]) -> str:
    """One row in words."""
    kinds = Counter(f["kind"] for f in found.get("findings", ()))
    told = ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "nothing found"
    for name in STATES:
        if name in found:
            return f"{name}: {found[name]}" + (f"; {told}" if kinds else "")
    errors = ", ".join(
        f"{name} x {held['ratio']}" for name, held in sorted(found["errors"].items())
    )
    return f"{found['read by']}; {told}; {errors}; {found['seconds']} s"


# --- what is told -------------------------------------------------------------------------------


VERDICTS = {
    "true": "a fault of the type as its library builds it",
    "by design": "as the report says, and meant so by its authors, or a part that this task leaves",
    "size": "so at the size built here, and not at the type's own",
    "false": "a false alarm",
    "open": "looked at, and not settled whether the module or the prediction is off",
}

GROUPS = (
    ("a mixture of experts", r"mixture of experts"),
    ("a recurrence, or no softmax attention at all", r"recurrence|no attention beside"),
    ("something acts between attention's heads and its output", r"acts between an attention"),
    ("latent or several projections", r"before a block's matrices is no norm|no single matrix"),
    ("norms behind a block's output alone, or other than in all layers", r"norms "),
    ("layers that share their weights, or differ", r"share their weights|differs between|layers t"),
    ("several streams", r"streams"),
    ("a feed-forward block of another kind", r"feed-forward block|activation"),
    ("it does not run on random input of the usual kinds", r"could not be run|does not run|batch "),
)
"""Why types are refused, in the order in which a reason is looked for."""


def judged() -> dict[str, dict[str, list[str]]]:
    return json.loads(JUDGED.read_text(encoding="utf-8"))


def reads(rows: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {kind: found for kind, found in rows.items() if "read by" in found}


def findings(rows: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Of every type the findings, those of one kind as one."""
    told = []
    for kind, found in sorted(rows.items()):
        seen: dict[str, dict[str, Any]] = {}
        for finding in found.get("findings", ()):
            seen.setdefault(finding["kind"], finding)
        told += [(kind, finding) for finding in seen.values()]
    return told


def group(reason: str) -> str:
    """Which of the common reasons a refusal has."""
    return next(
        (words for words, pattern in GROUPS if re.search(pattern, reason)), "something else"
    )


def spread(rows: dict[str, Any], quantity: str) -> np.ndarray:
    """|log(predicted / measured)| at the worst point of every read type."""
    ratios = [found["errors"].get(quantity, {}).get("ratio") for found in reads(rows).values()]
    return np.abs(np.log([ratio for ratio in ratios if ratio]))


def table() -> None:
    """How many types are read, why others are not, and how far predictions are from one draw."""
    data = stored()
    rows, found = data["rows"], findings(data["rows"])
    states = Counter(
        f"read by {row['read by']}" if "read by" in row else next(s for s in STATES if s in row)
        for row in rows.values()
    )
    ran = len(rows) - states["not built"] - states["not run"]
    share = tables.percent(len(reads(rows)) / ran)
    reasons = Counter(group(row["refused"]) for row in rows.values() if "refused" in row)
    counts = Counter(judged()[kind][finding["kind"]][0] for kind, finding in found)
    lines = []
    for name in ("variance", "grad_variance", "loss"):
        errors = spread(rows, name)
        cells = [tables.percent(float(np.expm1(np.quantile(errors, q)))) for q in (0.5, 0.9)]
        lines.append((name, len(errors), *cells))
    tables.put(
        "accuracy",
        "board",
        f"Run on transformers {data['versions']['transformers']}: of {len(rows)} types, "
        + ", ".join(f"{count} {state}" for state, count in states.most_common())
        + f". Of the {ran} that are built and run on random input, {share} % are predicted. "
        f"{len(found)} findings: "
        + ", ".join(f"{counts[name]} {name}" for name in VERDICTS)
        + ". Refused: "
        + "; ".join(f"{words} ({count})" for words, count in reasons.most_common())
        + ".",
        tables.markdown(
            ("worst point of the stream", "types", "median error, %", "90 % below"), lines
        ),
        dated=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("run", "show", "table"))
    parser.add_argument("--kinds", nargs="+", default=None)
    parser.add_argument("--again", action="store_true", help="also those that are stored")
    parser.add_argument("--limit", type=int, default=None, help="so many, then stop")
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    if given.command == "run":
        built("llama")  # what most types need is loaded once, before children part
        moments.check(built("gpt2"))
        run(given.kinds or list(module_classes()), given.again, given.limit)
    elif given.command == "table":
        table()
    else:
        for kind, found in stored()["rows"].items():
            print(f"{kind}: {state(found)}")


if __name__ == "__main__":
    main()
