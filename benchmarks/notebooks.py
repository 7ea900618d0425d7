"""Executes the notebooks and keeps their outputs small; tests hold what was stored.

    python benchmarks/notebooks.py run [NAME ...]   # executes all, or those named, and stores them
    python benchmarks/notebooks.py list             # what was stored, and how long it took

A notebook keeps its pictures and printed text. `data/notebooks.json` holds, by name, a hash of the
code that was executed, how long that took (by the clock of a machine that may have had other
work, and of its processors) and on what machine; `tests/test_notebooks.py` compares
it with what the notebook's cells say now, and executes the quick ones itself.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import platform
import resource
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import nbclient
import nbformat

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
STORE = ROOT / "benchmarks" / "data" / "notebooks.json"
MOST_BYTES = 400_000
"""Of one stored notebook."""
COLORS = 64
"""Of a stored picture: lines and letters need no more."""


def code_hash(notebook: Any) -> str:
    """Of the sources of the code cells, in order."""
    code = "\n\0".join(c.source for c in notebook.cells if c.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()


def execute(path: Path) -> tuple[Any, dict[str, float]]:
    """The notebook run from clean, and the seconds it took by the clock and of the processors."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    began, used = time.perf_counter(), _children()
    client = nbclient.NotebookClient(
        notebook, timeout=600, startup_timeout=300, kernel_name="python3"
    )
    done = client.execute()
    clock = round(time.perf_counter() - began, 1)
    return done, {"clock": clock, "processor": round(_children() - used, 1)}


def _children() -> float:
    """Processor seconds of the kernels that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def shrink(notebook: Any) -> None:
    """Pictures of few colours, no metadata, no HTML beside plain text that says the same."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        for output in cell.get("outputs", []):
            output.pop("metadata", None)
            if output.output_type in ("display_data", "execute_result"):
                output.metadata = {}
            data = output.get("data", {})
            if "image/png" in data:
                data["image/png"] = _fewer_colors(data["image/png"])


def _fewer_colors(picture: str) -> str:
    from PIL import Image

    image = Image.open(BytesIO(base64.b64decode(picture))).convert("RGB")
    small = BytesIO()
    image.quantize(COLORS, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def stored() -> dict[str, Any]:
    """What was executed, by name."""
    return json.loads(STORE.read_text(encoding="utf-8")) if STORE.exists() else {}


def run(names: list[str]) -> None:
    """Execute notebooks and store them with their outputs."""
    for name in names or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        path = FOLDER / f"{name}.ipynb"
        notebook, seconds = execute(path)
        shrink(notebook)
        text = nbformat.writes(notebook) + "\n"
        assert len(text.encode()) < MOST_BYTES, f"{name}: {len(text.encode())} bytes"
        path.write_text(text, encoding="utf-8")
        entry = {
            "code": code_hash(notebook),
            "seconds": seconds,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        }
        STORE.write_text(json.dumps({**stored(), name: entry}, indent=1, sort_keys=True) + "\n")
        print(f"{name}: {seconds} s, {len(text.encode()) // 1000} kB", flush=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("run", "list"))
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    if given.what == "run":
        run(given.names)
        return
    for name, entry in sorted(stored().items()):
        seconds = entry["seconds"]
        print(f"{name:<28}{seconds['clock']:>7} s ({seconds['processor']} s of the processors)")


if __name__ == "__main__":
    main()
