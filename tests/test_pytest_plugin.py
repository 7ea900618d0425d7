"""The plugin of pytest: a factory from the command line, and the fixture."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent
FILE = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from checked_gpt import Config, build
def right(): return build(Config(n_layer=2, n_embd=48, block_size=16), 1)
def wrong(): return build(Config(n_layer=2, n_embd=48, block_size=16, slip="gains drawn"), 1)
"""
TEST = """
import pytest
import mine

def test_right(moments_check):
    assert moments_check(mine.right()).healthy

def test_wrong(moments_check):
    with pytest.raises(AssertionError, match="norm gain"):
        moments_check(mine.wrong)
"""


def test_factories_are_checked_beside_the_tests_of_a_folder(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(mine=FILE, test_mine=TEST)
    result = pytester.runpytest_subprocess(
        *("-p", "moments.pytest_plugin", "-p", "no:cacheprovider"),
        *("--moments", "mine.py:right", "--moments", "mine.py:wrong", "--moments", "mine.py"),
    )
    result.assert_outcomes(passed=3, failed=2)
    result.stdout.fnmatch_lines(["GPT: 2 findings", "*norm gain*", "*name a file and a factory*"])
    assert "moments/torch/check.py" not in result.stdout.str()


def test_loading_the_plugin_loads_nothing_else() -> None:
    import subprocess
    import sys

    code = (
        "import sys, moments.pytest_plugin; print({'torch', 'numpy', 'typer'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
