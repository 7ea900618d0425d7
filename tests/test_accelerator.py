"""Modules on a GPU, in every precision: the verdicts of a processor, and left as they were.

Skipped where there is no GPU.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import moments
from moments.model.huggingface.sizes import sized_config

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

LENGTH = 32


def outcome(report: moments.Report) -> tuple[str, list[str]]:
    """Without the numbers, which dropout's masks move: they are others on another device."""
    found = json.loads(report.to_json())
    return found["scheme"], [finding["kind"] for finding in found["findings"]]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_a_gpu_changes_no_verdict(family: str, precision: torch.dtype) -> None:
    from moments.torch.huggingface_modules import build_module

    ids = torch.randint(5, 101, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    config = sized_config(family, 2, 64, vocab_size=101, seq_len=LENGTH)
    declared = moments.from_huggingface(config, seq_len=LENGTH)
    said = {}
    for where in ("cpu", "cuda"):
        module = build_module(config, 0).to(where, precision)
        before = [p.clone() for p in module.parameters()]
        batch = {"input_ids": ids.to(where), "labels": ids.to(where)}
        labels_are_made = moments.check(module, ids.to(where))
        audited = moments.torch.audit(module, declared)
        diagnosed = moments.diagnose(module, batch)
        measured = moments.torch.measure(lambda _, drawn=module: drawn, batch, seeds=1)
        said[where] = (
            *(outcome(moments.check(module, batch)), outcome(labels_are_made)),
            audited.passed,
            diagnosed.expected,
        )
        assert np.isfinite([measured.variance, measured.grad_variance]).all()
        assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
        assert {(p.device.type, p.dtype) for p in module.parameters()} == {(where, precision)}
    assert said["cuda"] == said["cpu"]
