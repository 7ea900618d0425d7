"""Bad input by the thousand: mutated configs and command lines, the same for the same seed.

A case is a command line with the files that it names. Every one of them must end in exit status 0,
1 or 2, without a traceback; `benchmarks/robustness.py` runs many under bounds of time and memory,
`test_robustness.py` a few.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import moments
from moments.model.huggingface import FAMILIES
from moments.model.huggingface.sizes import sized_config

FOLDER = "{folder}"
"""Stands for the case's own folder in its arguments."""

Choose = random.Random


@dataclass(frozen=True)
class Case:
    """One command line.

    Attributes:
        name: which generator, seed and number made it.
        arguments: after the word `moments`; FOLDER stands for the case's folder.
        files: contents by name; None is a folder.
    """

    name: str
    arguments: tuple[str, ...]
    files: dict[str, bytes | None] = field(default_factory=dict)

    def write(self, folder: Path) -> list[str]:
        """The files into a folder; the arguments that name them there."""
        for name, content in self.files.items():
            path = folder / name
            if content is None:
                path.mkdir(parents=True, exist_ok=True)
            else:
                path.write_bytes(content)
        return [word.replace(FOLDER, str(folder)) for word in self.arguments]


# --- values ---------------------------------------------------------------------------------------


def _deep(depth: int, leaf: Any = 1) -> Any:
    for level in range(depth):
        leaf = [leaf] if level % 2 else {"a": leaf}
    return leaf


JUNK: tuple[Any, ...] = (
    *(None, True, False, "", "x", "768", "evil/kernel", "é\u202e\x00", "gelu", "x" * 3000),
    *(0, 1, -1, 2, 3, 7, 100, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**40, 10**400),
    *(0.5, -0.5, 1.0, 1.5, 768.0, 1e-300, 1e-30, 1e30, 1e300, float("nan"), float("inf")),
    *([], {}, [1, 2], [None], [[]], {"a": 1}, {"rope_theta": "x"}, {"type": [1]}, _deep(40)),
)

RAW_JUNK = ("1e999", "-1e999", "0x10", "1_000", "١٢", "nan", "9" * 5000, "[" * 3000, '{"a":' * 3000)


def _scalar(choose: Choose, value: Any) -> Any:
    """A value near this one, or of another type."""
    if isinstance(value, bool):
        return choose.choice((not value, int(value), str(value), None))
    if isinstance(value, int | float) and abs(value) < 1e100:
        near = (value + 1, value - 1, -value, 2 * value, value // 2, value / 3, float(value))
        far = (str(value), [value], value * 10**9, value * value, {"value": value}, None)
        return choose.choice((*near, *far))
    return choose.choice(JUNK)


def _mutate(choose: Choose, entries: dict[str, Any], names: tuple[str, ...]) -> None:
    """One change of a mapping, in place."""
    kind = choose.randrange(8)
    if not entries or kind == 0:
        entries[choose.choice(names)] = choose.choice(JUNK)
        return
    name = choose.choice(sorted(entries))
    if kind == 1:
        del entries[name]
    elif kind == 2:
        entries[choose.choice(names)] = entries.pop(name)
    elif kind == 3:
        entries[name] = choose.choice(JUNK)
    elif isinstance(entries[name], dict) and entries[name]:
        _mutate(choose, entries[name], names)
    else:
        entries[name] = _scalar(choose, entries[name])


def _encoded(choose: Choose, data: Any) -> bytes:
    """JSON, now and then not quite."""
    text = json.dumps(data)
    kind = choose.randrange(40)
    if kind == 0:
        text = text[: choose.randrange(len(text) + 1)]
    elif kind == 1:
        at = choose.randrange(len(text) + 1)
        text = text[:at] + choose.choice(RAW_JUNK) + text[at:]
    elif kind == 2:
        text = json.dumps(choose.choice(JUNK))
    elif kind == 3:
        text = choose.choice(RAW_JUNK)
    found = text.encode("utf-8")
    if kind == 4:
        broken = bytearray(found)
        for _ in range(3):
            broken[choose.randrange(len(broken))] = choose.randrange(256)
        found = bytes(broken)
    elif kind == 5:
        found = b"\xef\xbb\xbf" + found if choose.random() < 0.5 else text.encode("utf-16")
    return found


# --- configs --------------------------------------------------------------------------------------

_RARE = (
    *("rope_scaling", "rope_parameters", "layer_types", "attention_types", "id2label"),
    *(
        "attn_implementation",
        "_attn_implementation",
        "quantization_config",
        "auto_map",
        "torch_dtype",
    ),
    *("dtype", "num_labels", "pruned_heads", "head_dim", "num_key_value_heads", "n_inner"),
    *("num_local_experts", "architectures", "pad_token_id", "tie_word_embeddings", "loss_type"),
)
_NAMES = tuple(
    sorted({name for family in FAMILIES.values() for name in family.defaults} | {*_RARE})
)


def mutated_config(choose: Choose) -> dict[str, Any]:
    """A small config of some family with one to four changes."""
    kind = choose.choice(sorted(FAMILIES))
    entries = sized_config(kind, 2, 16, heads=4, vocab_size=130, seq_len=16)
    if choose.random() < 0.3:
        entries = {**FAMILIES[kind].defaults, **entries}
    for _ in range(choose.choice((1, 1, 1, 2, 4))):
        _mutate(choose, entries, _NAMES)
    return entries


_LIGHT: tuple[tuple[str, ...], ...] = (
    *(("predict", "{config}", "--json"),) * 10,
    *(("predict", "{config}", "--seq-len", "8"),) * 4,
    ("predict", "{config}", "--theory", "published"),
    ("predict", "{config}", "--scheme", "deepnorm"),
    ("explain", "{config}", "--seq-len", "8", "--layer", "2"),
    ("solve", "{config}", "--seq-len", "8", "--objective", "xavier", "--json"),
    ("schemes", "{config}", "--seq-len", "8", "--scheme", "xavier", "--json"),
)
_MODULES: tuple[tuple[str, ...], ...] = (
    ("audit", "{config}", "--json"),
    ("audit", "{config}", "--layers", "1", "--scheme", "xavier"),
    ("compare", "{config}", "--seq-len", "8", "--seeds", "1", "--batch", "1", "--json"),
    ("compare", "{config}", "--layers", "1", "--seeds", "2", "--no-picture", "--seq-len", "8"),
)


def configs(seed: int, count: int, *, modules: float = 0.1) -> Iterator[Case]:
    """Mutated configs, each under some command that reads one.

    Args:
        seed: the same, the same cases.
        count: how many.
        modules: share of commands that build a torch module.
    """
    for number in range(count):
        choose = Choose(f"config {seed} {number}")
        commands = _MODULES if choose.random() < modules else _LIGHT
        file = f"{FOLDER}/config.json"
        words = [file if word == "{config}" else word for word in choose.choice(commands)]
        content = _encoded(choose, mutated_config(choose))
        yield Case(f"config {seed} {number}", tuple(words), {"config.json": content})


# --- command lines --------------------------------------------------------------------------------

_OWN = ("--layers", "2", "--d-model", "16", "--heads", "4", "--seq-len", "8")
_SMALL = ("--layers", "2", "--seq-len", "8")
_GOOD: tuple[tuple[str, ...], ...] = (
    ("predict", *_OWN),
    ("predict", *_OWN, "--norm", "post", "--activation", "gelu", "--causal", "--json"),
    ("predict", *_OWN, "--variance", "2", "--correlation", "0.3", "--grad-variance", "1"),
    ("predict", *_OWN, "--dropout", "0.1", "--csv", f"{FOLDER}/out.csv", "--theory", "published"),
    ("predict", *_OWN, "--plot", f"{FOLDER}/out.png", "--d-ff", "32", "--scheme", "dslm"),
    ("predict", *_OWN, "--scheme", "xavier", "--option", "per_head=false"),
    ("solve", f"{FOLDER}/model.json", "--scheme", "normal", "--option", "variance=0.01"),
    ("predict", f"{FOLDER}/good.json", "--json"),
    ("predict", f"{FOLDER}/plan.json", "--json"),
    ("predict", f"{FOLDER}/model.json"),
    ("solve", "bert-tiny", "--seq-len", "8", "--objective", "xavier", "--json"),
    ("solve", "bert-tiny", *_SMALL, "--objective", "final_variance", "--target", "2"),
    ("solve", f"{FOLDER}/model.json", "--goal", "final_variance=2", "--tolerance", "1e-6"),
    (
        "solve",
        f"{FOLDER}/model.json",
        "--objective",
        "largest_k",
        "--bound",
        "final_correlation=.9",
    ),
    ("solve", "bert-tiny", *_SMALL, "--free", "output", "--objective", "stream_variance"),
    ("explain", "bert-tiny", "--seq-len", "8", "--layer", "1", "--latex"),
    ("explain", f"{FOLDER}/model.json", "--layer", "2", "--json", "--variance", "1"),
    ("compare", "bert-tiny", "--seq-len", "8", "--seeds", "1", "--batch", "1", "--json"),
    ("compare", f"{FOLDER}/good.json", "--seed", "1", "--layers", "1", "--max-error", "0.5"),
    ("audit", "bert-tiny", "--scheme", "xavier", "--layers", "1", "--seed", "3"),
    ("audit", f"{FOLDER}/good.json", "--plan", f"{FOLDER}/plan.json", "--csv", f"{FOLDER}/a.csv"),
    ("audit", f"{FOLDER}/checkpoint", "--json"),
    ("audit", f"{FOLDER}/weights.safetensors"),
    ("schemes", f"{FOLDER}/model.json", "--scheme", "xavier", "--scheme", "dslm"),
    ("schemes", "bert-tiny", *_SMALL, "--scheme", "lns", "--plot", f"{FOLDER}/s.png"),
    ("formulas", "relu", "--theory", "published", "--json"),
    ("formulas", "--latex", "layernorm"),
    ("schemes", "--json"),
    ("validate", "--subset", "pre-noci-*", "--theory", "simplified"),
    ("validate", "--subset", "nothing"),
    ("validate", "--max-error", "0.1", "--theory", "published", "--csv", f"{FOLDER}/v.csv"),
)

_WORDS = (
    *("", " ", "-", "--", "x", "0", "1", "-1", "2", "3.5", "nan", "inf", "-inf", "1e400", "1e30"),
    *(
        "1e-30",
        "9223372036854775808",
        "1" + "0" * 30,
        "1" + "0" * 4400,
        "true",
        "[bold]",
        "é",
        "🙂",
    ),
    *("/", ".", "..", "/dev/null", "/dev/zero", "/nowhere/x", "~", FOLDER, "x" * 300, "a/" * 3000),
    *(
        "--json",
        "--help",
        "--layers",
        "--no-such",
        "-x",
        "--csv",
        "--plot=",
        "--plot=/",
        "--layers=",
    ),
    *("=", "a=", "=1", "final_variance=x", "final_variance=nan", "x=1=2", "bert-base,gpt2", "None"),
    *("bert-bass", "deepnrm", "xavir", "predict", "audit", "\udce9", "evil/kernel", "%s%n", "$(x)"),
)
_FILES = (
    *(
        "good.json",
        "plan.json",
        "model.json",
        "runs.json",
        "empty",
        "folder",
        "binary",
        "deep.json",
    ),
    *("list.json", "null.json", "huge.json", "utf16.json", "checkpoint", "weights.safetensors"),
    *("missing.json", "config.json", "good.json/x", "folder/", "x" * 300 + ".json"),
)


def _documents(choose: Choose) -> dict[str, bytes | None]:
    """What a case's folder holds: sound files, some of them mutated, and unsound ones."""
    config = sized_config("gpt2", 2, 16, heads=4, vocab_size=130, seq_len=8)
    model = moments.Transformer(2, 16, 4, 8, dropout=0.1)
    plan = json.loads(_plan())
    runs = {"format_version": 1, "measurements": {"x": {"digest": "y", "seeds": 1, "values": {}}}}
    documents: dict[str, Any] = {
        "good.json": config,
        "plan.json": plan,
        "model.json": model.to_dict(),
        "runs.json": runs,
    }
    for name, data in documents.items():
        if choose.random() < 0.5:
            for _ in range(choose.choice((1, 1, 2))):
                _mutate(choose, data, _NAMES)
            documents[name] = data
    found: dict[str, bytes | None] = {
        name: _encoded(choose, data) for name, data in documents.items()
    }
    return found | {
        "empty": b"",
        "folder": None,
        "binary": bytes(range(256)) * 8,
        "deep.json": choose.choice((b"[" * 100_000, b'{"a":' * 900 + b"1" + b"}" * 900)),
        "list.json": b"[1, 2]",
        "null.json": b"null",
        "huge.json": json.dumps({**config, "n_layer": 10**30, "model_type": "g" * 10**6}).encode(),
        "utf16.json": json.dumps(config).encode("utf-16"),
        "checkpoint": None,
        "checkpoint/config.json": found["good.json"],
        "checkpoint/model.safetensors": choose.choice(
            (b"", b"\x08" + b"\0" * 7 + b"{}      ", b"x" * 99)
        ),
        "weights.safetensors": choose.choice((b"", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"{}")),
        "config.json": found["good.json"],
    }


@functools.cache
def _plan() -> str:
    """JSON of a plan."""
    model = moments.Transformer(2, 16, 4, 8, dropout=0.1)
    return moments.solve(model, "xavier").to_json()


def _changes() -> tuple[Callable[[Choose, list[str]], None], ...]:
    """Ways to spoil a command line, in place; the command itself stays first where it can."""

    def at(choose: Choose, words: list[str]) -> int:
        return choose.randrange(1, len(words)) if len(words) > 1 else 0

    def junk(choose: Choose) -> str:
        return (
            choose.choice(_WORDS) if choose.random() < 0.6 else f"{FOLDER}/{choose.choice(_FILES)}"
        )

    def replaced(choose: Choose, words: list[str]) -> None:
        words[at(choose, words)] = junk(choose)

    def value(choose: Choose, words: list[str]) -> None:
        options = [i for i, word in enumerate(words[:-1]) if word.startswith("--")]
        words[choose.choice(options) + 1 if options else -1] = junk(choose)

    def dropped(choose: Choose, words: list[str]) -> None:
        del words[at(choose, words)]

    def added(choose: Choose, words: list[str]) -> None:
        words.insert(at(choose, words) + 1, junk(choose))

    def option(choose: Choose, words: list[str]) -> None:
        other = choose.choice(_GOOD)
        names = [word for word in other if word.startswith("--")] or ["--json"]
        words += [choose.choice(names), junk(choose)]

    def twice(choose: Choose, words: list[str]) -> None:
        words.insert(at(choose, words), words[at(choose, words)])

    def command(choose: Choose, words: list[str]) -> None:
        words[0] = choose.choice([good[0] for good in _GOOD] + ["", "predcit", "--json", FOLDER])

    return replaced, value, value, value, dropped, added, option, option, twice, command


def command_lines(seed: int, count: int) -> Iterator[Case]:
    """Command lines that are, most of them, wrong in one to three places."""
    ways = _changes()
    for number in range(count):
        choose = Choose(f"line {seed} {number}")
        words = list(choose.choice(_GOOD))
        for _ in range(choose.choice((0, 1, 1, 1, 1, 2, 3))):
            choose.choice(ways)(choose, words)
            words = words or [""]
        yield Case(f"line {seed} {number}", tuple(words), _documents(choose))
