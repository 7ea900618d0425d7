"""One thread per process: tests run side by side, and small matrices gain nothing from more. What a
test registers is gone behind it, whatever the order."""

from __future__ import annotations

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import pytest  # noqa: E402  (after the threads are set)

from moments.formulas import named_activations  # noqa: E402


@pytest.fixture(autouse=True)
def _no_registration_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_activations, "_REGISTERED", {})
