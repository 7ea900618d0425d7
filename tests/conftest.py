"""One thread per process: tests run side by side, and small matrices gain nothing from more. What a
test registers is gone behind it, whatever the order. The garbage collector looks seldom, and never
at what was imported for the tests: millions of objects, a tenth of all time."""

from __future__ import annotations

import gc
import os

import pytest

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
gc.set_threshold(20_000, 10, 10)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_registration_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moments.formulas.activation._REGISTERED", {})
