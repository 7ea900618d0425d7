"""Configs whose modules no Transformer describes, against modules of their own width."""

from __future__ import annotations

import json

import numpy as np
import pytest

import moments
from moments import DomainError
from moments.errors import Undeclared

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from moments.torch.from_config import predicted  # noqa: E402

ALBERT = {
    "model_type": "albert",
    "num_hidden_layers": 2,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "embedding_size": 256,
    "vocab_size": 300,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def measured(entries, draws=4):
    """Mean squares of what submodules of the whole module give, by path, at their first call."""
    settings = transformers.CONFIG_MAPPING[entries["model_type"]](
        **{k: v for k, v in entries.items() if k != "model_type"}
    )
    rows = {}
    for draw in range(draws):
        torch.manual_seed(draw)
        module = transformers.AlbertForMaskedLM(settings)
        seen = {}

        def keep(path, made, seen=seen):
            tensor = made if isinstance(made, torch.Tensor) else next(iter(made))
            if isinstance(tensor, torch.Tensor):
                seen.setdefault(path, []).append(float(tensor.double().square().mean()))

        for path, part in module.named_modules():
            part.register_forward_hook(lambda _, __, made, path=path: keep(path, made))
        with torch.no_grad():
            module(input_ids=torch.randint(5, 300, (1, 12)))
        for path, values in seen.items():
            rows.setdefault(path, []).append(values)
    return {path: np.mean(values, 0) for path, values in rows.items()}


@pytest.mark.slow
def test_a_narrow_module_has_the_signal_of_a_wide_one():
    result = predicted(ALBERT)
    assert any("width 256 with the config's depth stands for width 1024" in n for n in result.notes)
    assert not any("follows the width" in note for note in result.notes)
    wide, calls, judged = measured(ALBERT), {}, 0
    for row in result.outputs:
        call = calls[row.module] = calls.get(row.module, -1) + 1
        if call < len(wide.get(row.module, ())):
            judged += 1
            square = row.variance + row.mean**2
            assert square == pytest.approx(wide[row.module][call], rel=0.08), row.module
    assert judged > 30


def test_a_width_in_the_code_is_named():
    scaled = {**ALBERT, "model_type": "xglm", "d_model": 1024, "ffn_dim": 1024, "num_layers": 1}
    scaled |= {"attention_heads": 8}
    notes = predicted(scaled).notes
    assert any("the variance follows the width, 0.5" in note for note in notes)


def test_a_config_without_a_declaration_is_checked(tmp_path):
    fnet = {"model_type": "fnet", "num_hidden_layers": 1, "hidden_size": 512, "vocab_size": 300}
    fnet["intermediate_size"] = 512
    with pytest.raises(Undeclared, match="no stack of attention"):
        moments.from_huggingface(fnet)
    report = moments.check(fnet)
    assert report.healthy
    assert "in a module of width 256 for one of 512" in report.read
    # its Fourier transform over features is not divided by their number
    (note,) = [n for n in report.notes if "fourier" in n and "follows the width" in n]
    assert float(note.split("width, ")[1].split()[0]) == pytest.approx(0.5, abs=0.05)
    with pytest.raises(DomainError, match="no stack of attention"):
        moments.check(fnet, scheme="dslm")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fnet))
    assert moments.check(path).healthy
