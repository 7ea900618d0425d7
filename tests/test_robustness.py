"""Bad input in this process: a few hundredths of what `benchmarks/robustness.py` runs."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import warnings
from pathlib import Path

import mutations
import pytest

from moments import DomainError
from moments.cli import main
from moments.model.huggingface import FAMILIES
from moments.model.huggingface.config import from_huggingface
from moments.model.huggingface.entries import IRRELEVANT, MOST_LAYERS
from moments.model.huggingface.sizes import sized_config

# What builds torch modules, predicts a grid or searches takes seconds: the campaign has it.
SLOW = {"audit", "compare", "validate", "--goal", "final_variance", "largest_k"}


def ended(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit status of the command in this process; anything but an exit is the test's failure."""
    monkeypatch.setattr(sys, "argv", ["moments", *arguments])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(SystemExit) as end:
            main()
    return 0 if end.value.code is None else int(end.value.code)


def holds(
    cases: list[mutations.Case],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> set[int]:
    """The exit statuses of the cases, each of which must end as a command may."""
    found = set()
    for number, case in enumerate(cases):
        own = folder / str(number)
        own.mkdir()
        monkeypatch.chdir(own)
        status = ended(case.write(own), monkeypatch)
        said = capsys.readouterr().err
        assert status in (0, 1, 2), case.name
        if status == 2:
            errors = [line for line in said.splitlines() if line.startswith("error: ")]
            assert len(errors) == 1 or "--help" in case.arguments or not said, (case.name, said)
            assert len(said) < 8000, case.name
        assert "Traceback" not in said, case.name
        found.add(status)
    return found


def test_mutated_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = list(mutations.configs(11, 8, modules=0.0))
    assert holds(cases, tmp_path, monkeypatch, capsys) >= {0, 2}


def test_mutated_configs_are_read_or_refused(tmp_path: Path) -> None:
    read = 0
    for case in mutations.configs(12, 300):
        case.write(tmp_path)
        with warnings.catch_warnings(), contextlib.suppress(DomainError):
            warnings.simplefilter("ignore")
            from_huggingface(tmp_path).to_dict()
            read += 1
    assert 30 < read < 270


def test_bad_command_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = mutations.command_lines(11, 400)
    cases = itertools.islice((c for c in lines if not SLOW.intersection(c.arguments)), 15)
    assert holds(list(cases), tmp_path, monkeypatch, capsys) >= {0, 2}


def test_a_seed_gives_the_same_cases() -> None:
    for generator in (mutations.configs, mutations.command_lines):
        first, again = list(generator(3, 5)), list(generator(3, 5))
        assert first == again
        assert len({case.arguments + tuple(case.files.items()) for case in first}) == 5


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("gpt2", {"vocab_size": "x"}, "vocab_size = 'x': must be an integer"),
        ("gpt2", {"n_layer": 10**30}, "n_layer = 1000000000000000000000000000000: must be an int"),
        ("gpt2", {"n_positions": 2**64}, "n_positions"),
        ("gpt2", {"initializer_range": float("nan")}, "initializer_range = nan: must be finite"),
        ("gpt2", {"initializer_range": 1e300}, "initializer_range"),
        ("bert", {"type_vocab_size": [2]}, "type_vocab_size = .2.: must be an integer"),
        ("bert", {"hidden_dropout_prob": True}, "hidden_dropout_prob = True: must be a number"),
        ("roberta", {"pad_token_id": "1"}, "pad_token_id"),
        ("llama", {"rope_scaling": 3}, "rope_scaling = 3: must be a JSON object"),
        ("llama", {"num_key_value_heads": {"a": 1}}, "num_key_value_heads"),
        ("qwen2", {"num_hidden_layers": 10**9}, f"num_hidden_layers.* at most {MOST_LAYERS}"),
        ("gemma2", {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar = -4.0: must be positive"),
        ("granite", {"attention_multiplier": 0}, "attention_multiplier = 0.0: must be positive"),
        ("gpt_neo", {"attention_types": [[["global"], 10**12]]}, "attention_types"),
        ("gpt_neo", {"attention_types": [["global"]]}, "attention_types"),
        ("t5", {"initializer_factor": 1e200}, "initializer_factor"),
        ("deberta-v2", {"pos_att_type": [1]}, "pos_att_type"),
        ("vit", {"id2label": 5}, "id2label = 5: must be a JSON object"),
        ("gpt_neox", {"rotary_pct": []}, "rotary_pct = ..: must be a number"),
        ("gpt_neox", {"rotary_emb_base": "x"}, "rotary_emb_base = 'x': must be a number"),
        ("gemma", {"hidden_act": ""}, "hidden_act = ''"),
        ("gemma", {"hidden_activation": []}, "hidden_activation"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_an_entry_of_another_kind_is_named(
    kind: str, changes: dict[str, object], named: str
) -> None:
    config = sized_config(kind, 2, 16, heads=4, vocab_size=130, seq_len=16)
    with pytest.raises(DomainError, match=named):
        from_huggingface(config | changes)


WRONG: dict[type, list[object]] = {
    bool: ["x", [], 2.5],
    int: ["x", [], {}, 1.5, True],
    float: ["x", [], {}, True],
    str: [[], {}, 1.5, True],
    dict: ["x", [], 1.5],
    list: ["x", {}, 1.5],
}


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_no_entry_of_a_family_takes_another_kind_in_silence(kind: str) -> None:
    """Every entry that its class gives a default, in a config that has all of them."""
    base = sized_config(kind, 2, 16, heads=4, vocab_size=130, seq_len=16)
    known = {**FAMILIES[kind].defaults, **base}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, usual in known.items():
            if usual is None or name == "model_type" or name in IRRELEVANT:
                continue
            for wrong in WRONG[type(usual)]:
                with pytest.raises(DomainError, match=name):
                    from_huggingface({**known, name: wrong})


def test_a_long_value_is_not_echoed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "g" * 10**7}))
    for arguments in (
        ["predict", str(tmp_path)],
        ["predict", "x" * 10**6],
        ["predict", "--layers", "1" * 10**5],
        ["solve", "bert-tiny", "--objective", "y" * 10**6],
    ):
        assert ended(arguments, monkeypatch) == 2
        assert len(capsys.readouterr().err) < 3000
