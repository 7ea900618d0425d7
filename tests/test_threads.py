"""BLAS threads: one while matrices are small, and afterwards as many as before."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

import moments
from moments.engine.composition import Layer
from moments.prediction.gate import SMALL, _controller, few_threads

threadpoolctl = pytest.importorskip("threadpoolctl")


@pytest.fixture(autouse=True)
def _two() -> object:
    """Whatever this machine has, its environment says and tests before have loaded, two to begin
    with."""
    _controller.cache_clear()
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        if set(count()) != {2}:
            pytest.skip("this BLAS has one thread only")
        yield


def count() -> list[int]:
    found = threadpoolctl.threadpool_info()
    return [one["num_threads"] for one in found if one["user_api"] == "blas"]


def test_small_matrices_are_left_to_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    whole = Layer.propagate

    def watched(*args: Any) -> Any:
        seen.extend(count())
        return whole(*args)

    monkeypatch.setattr(Layer, "propagate", watched)
    model = moments.Transformer(1, 32, 2, 8, causal=True)
    moments.predict(model)
    assert set(seen) == {1}
    assert set(count()) == {2}
    seen.clear()
    moments.predict(model.replace(causal=False))  # tokens alike: no matrices
    assert set(seen) == {2}


def test_large_matrices_keep_theirs() -> None:
    with few_threads(SMALL + 1):
        assert set(count()) == {2}
    with few_threads(SMALL):
        assert set(count()) == {1}
    assert set(count()) == {2}


def test_it_is_put_back_after_an_error_and_inside_each_other() -> None:
    with pytest.raises(RuntimeError), few_threads(8):
        raise RuntimeError
    assert set(count()) == {2}
    with few_threads(8):
        with few_threads(9):
            assert set(count()) == {1}
        assert set(count()) == {1}
    assert set(count()) == {2}


LATER = """
import threadpoolctl
import moments
from moments.prediction.gate import few_threads

model = moments.Transformer(1, 32, 2, 8, causal=True)
moments.predict(model)
import scipy.linalg

with threadpoolctl.threadpool_limits(2, user_api="blas"):
    with few_threads(8):
        found = [one for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"]
print(len(found), *{one["num_threads"] for one in found})
"""


@pytest.mark.parametrize("threads", ["1", "2", None])
def test_a_library_that_comes_later_is_found(threads: str | None) -> None:
    """scipy brings a BLAS of its own, which predictions alone do not load; whatever the caller's
    environment says."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    if threads is not None:
        environment |= dict.fromkeys(names, threads)
    command = [sys.executable, "-c", LATER]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    count, *seen = found.stdout.split()
    if count == "1":
        pytest.skip("scipy and numpy share one BLAS")
    assert seen == ["1"]
