"""How long a cold interpreter takes to import the package, and to a first prediction.

    python benchmarks/startup.py [--runs 5]

Wall clocks of an idle machine: the least of several runs. What the tests hold instead is which
modules are loaded on the way (`tests/test_imports.py`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys

IMPORT = "import moments"
COMMAND = (
    "import sys; sys.argv = ['moments', 'predict', 'bert-base']\n"
    "from moments.cli import main\n"
    "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
)


def seconds(code: str) -> float:
    """Of `code` in a new interpreter, without the interpreter's own start."""
    timed = f"import time; t = time.perf_counter()\n{code}\nprint(time.perf_counter() - t)"
    done = subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    for name, code in (("import moments", IMPORT), ("moments predict bert-base", COMMAND)):
        print(f"{name:28}{min(seconds(code) for _ in range(runs)):6.2f} s")


if __name__ == "__main__":
    main()
