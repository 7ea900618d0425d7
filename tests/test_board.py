"""The board of what ships: what is stored, and a few of its rows anew."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import pytest

import moments

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

board = pytest.importorskip("board")


ROWS = board.stored()["rows"]
STATES = (*board.STATES, "read by")


def test_every_row_says_how_it_ended() -> None:
    assert set(ROWS) <= set(board.module_classes())
    assert len(ROWS) >= 600
    assert all(sum(state in found for state in STATES) == 1 for found in ROWS.values())
    assert all(found[state] for found in ROWS.values() for state in STATES if state in found)


def test_every_finding_was_looked_at() -> None:
    judged = board.judged()
    told = board.findings(ROWS)
    verdicts = [judged[kind][finding["kind"]][0] for kind, finding in told]
    assert set(verdicts) <= set(board.VERDICTS)
    assert verdicts.count("false") <= 0.02 * len(board.reads(ROWS))


def test_known_faults_are_among_them() -> None:
    """None of them is named where findings are made."""
    for kind in ("clip_text_model", "clip_vision_model"):
        (finding,) = ROWS[kind]["findings"]
        assert finding["kind"] == "wrong variance"
        assert "on query, key and value instead of output" in finding["reason"]
    ones = [k for k, f in board.findings(ROWS) if f["kind"] == "forgetting"]
    assert {"bamba", "qwen3_next", "jamba"} <= set(ones)
    assert not {"mamba", "mamba2"} & set(ones)
    (drawn,) = ROWS["modernbert-decoder"]["redrawn"]
    assert drawn.startswith("model.embeddings.tok_embeddings.weight: 0.2")


@pytest.mark.parametrize("kind", ["clip_text_model", "gpt_bigcode"])
def test_a_row_anew(kind: str) -> None:
    if transformers.__version__ != board.stored()["versions"]["transformers"]:
        pytest.skip("another transformers than the stored rows were made under")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = json.loads(json.dumps(board.row(kind)))
    stored = ROWS[kind]
    assert [f["kind"] for f in found.get("findings", ())] == [
        f["kind"] for f in stored.get("findings", ())
    ]
    for name in ("module", "read by", "parameters", "redrawn"):
        assert found.get(name) == stored.get(name), name
    for quantity, errors in stored.get("errors", {}).items():
        assert found["errors"][quantity]["ratio"] == pytest.approx(errors["ratio"], rel=0.02)


# --- sizes ----------------------------------------------------------------------------------------


def test_sizes_follow_the_names_of_entries() -> None:
    entries = {
        "num_hidden_layers": 24,
        "layer_types": ["linear"] * 3 + ["full"] + ["linear"] * 20,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 50000,
        "eos_token_id": 49999,
        "initializer_range": 0.02,
        "per_layer_config": {"1": 3, "9": 4},
        "vision_config": {"image_size": 224, "patch_size": 16, "depths": [2, 2, 18, 2]},
    }
    found = board.shrunk(entries)
    assert found["num_hidden_layers"] == board.LAYERS
    assert found["layer_types"] == ["linear", "full"]
    assert (found["hidden_size"], found["num_attention_heads"]) == (board.WIDTH, board.HEADS)
    assert found["num_key_value_heads"] == board.HEADS
    assert found["eos_token_id"] == board.VOCABULARY - 1
    assert found["initializer_range"] == 0.02
    assert found["per_layer_config"] == {"1": 3}
    assert found["vision_config"] == {"image_size": 32, "patch_size": 8, "depths": [2, 2, 2, 2]}


def test_a_tensor_that_the_initialiser_would_draw_otherwise() -> None:
    module = board.built("gpt2")
    assert board.redrawn(module) == []
    with torch.no_grad():
        for block in module.transformer.h:
            block.attn.c_proj.weight.mul_(2)
    (words,) = board.redrawn(module)
    assert words.startswith("transformer.h.*.attn.c_proj.weight: 0.25")


# --- recurrences ----------------------------------------------------------------------------------


class Recurrent(torch.nn.Module):
    """h_t = exp(-step_t A) h_(t-1) + x_t, the step a softplus."""

    def __init__(self, bias: float) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(11, 4)
        self.bias = torch.nn.Parameter(torch.full((4,), bias))
        self.rate = torch.nn.Parameter(torch.tensor([0.0, 0.5, 1.0, 2.0]))

    def forward(self, ids: Any) -> Any:
        x = self.table(ids)
        step = torch.nn.functional.softplus(0 * x + self.bias)
        keep = torch.exp(step * -torch.exp(self.rate))
        state, out = torch.zeros_like(x[:, 0]), []
        for t in range(ids.shape[1]):
            state = keep[:, t] * state + x[:, t]
            out.append(state)
        return torch.stack(out, 1)


@pytest.mark.parametrize("memory", [0.76, 3.95, 4.05, 55.0])
def test_how_long_a_state_remembers(memory: float) -> None:
    """1 / (softplus(b) A), reported where it is less than what the layer's convolution sees."""
    bias = math.log(math.expm1(1 / memory))
    report = moments.check(Recurrent(bias), torch.arange(8)[None])
    assert [finding.kind for finding in report.findings] == ["forgetting"] * (memory < 4)
    for finding in report.findings:
        assert finding.where == ("bias",)
        assert finding.measured == pytest.approx(memory, rel=1e-5)
        assert f"all entries are {bias:g}" in finding.reason
