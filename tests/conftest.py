"""One thread per process: tests run side by side, and small matrices gain nothing from more. What a
test registers is gone behind it, whatever the order."""

from __future__ import annotations

import os

import pytest

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")


@pytest.fixture(autouse=True)
def _no_registration_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moments.formulas.named_activations._REGISTERED", {})
