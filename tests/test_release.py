"""The wheel: built, installed into a fresh environment with what it declares, and put to work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAIN_JOB = """
import json, pathlib, moments

prediction = moments.predict(moments.preset("gpt2", seq_len=16))
report = moments.check(moments.preset("bert-tiny", seq_len=16))
page = moments.report(moments.preset("bert-tiny", seq_len=16), schemes=["dslm"]).to_html()
prediction.plot().savefig("stream.png")
print(json.dumps({
    "from": moments.__file__,
    "variance": prediction.variance.tolist(),
    "said": str(report),
    "pictures": page.count("<svg"),
}))
"""


def run(*words: str | Path, where: Path) -> str:
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = tuple(map(str, words))
    done = subprocess.run(words, cwd=where, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_the_wheel_does_the_main_job_where_nothing_else_is_installed(tmp_path: Path) -> None:
    import moments

    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT, where=ROOT)
    (wheel,) = tmp_path.glob("transformer_moments-*.whl")
    venv.create(tmp_path / "fresh", with_pip=True)
    scripts = tmp_path / "fresh" / ("Scripts" if sys.platform == "win32" else "bin")
    pinned = ("-c", ROOT / "constraints.txt")
    run(scripts / "python", "-m", "pip", "install", "-q", *pinned, wheel, where=tmp_path)
    answer = json.loads(run(scripts / "python", "-c", MAIN_JOB, where=tmp_path))
    assert Path(answer["from"]).is_relative_to(tmp_path / "fresh")
    expected = moments.predict(moments.preset("gpt2", seq_len=16)).variance
    assert answer["variance"] == pytest.approx(expected.tolist(), rel=1e-12)
    assert answer["said"]
    assert answer["pictures"] >= 2
    assert (tmp_path / "stream.png").stat().st_size > 10_000
    printed = run(scripts / "moments", "predict", "bert-tiny", "--json", where=tmp_path)
    assert json.loads(printed)["format"] == 1
    assert "torch" not in run(scripts / "python", "-m", "pip", "list", where=tmp_path).split()
