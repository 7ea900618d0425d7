"""Bad input by the thousand: mutated configs and command lines, each in a process of its own.

A case passes if it ends in exit status 0, 1 or 2, without a traceback, within 10 seconds of
processor time and 2 GB. The cases are those of tests/mutations.py.

    python benchmarks/robustness.py --configs 10000 --lines 1000 --seed 0

The counts, the slowest and the largest case, and the command line of every failure are printed,
and written where --output says.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))
SECONDS, BYTES = 10, 2 * 2**30
KINDS = ("config", "line")
# What a case imports costs no time of its own: it is loaded once, before any process is forked.
LOADED = ("pandas", "matplotlib.figure", "sympy", "torch", "transformers", "moments.torch")
# Sound commands, run once for what they import and the tables that they read.
SOUND = (
    "predict --layers 2 --d-model 16 --heads 4 --seq-len 8 --causal --plot x.png --csv x.csv",
    "predict --layers 2 --d-model 16 --heads 4 --seq-len 8",
    "predict gpt2 --layers 2 --seq-len 8 --json",
    "explain llama-7b --layers 2 --seq-len 8 --json",
    "solve bert-tiny --seq-len 8 --json",
    "schemes bert-tiny --seq-len 8 --scheme xavier",
    "compare bert-tiny --seq-len 8 --seeds 1 --batch 1 --json",
    "audit bert-tiny",
)


@dataclass(frozen=True)
class Outcome:
    """How one case ended.

    Attributes:
        name, arguments: of the case.
        status: exit status; minus the signal where one ended it.
        seconds: of processor time, without imports.
        megabytes: most memory at once, with what was imported.
        said: the last line on standard error.
        fault: "" or what is wrong with it.
    """

    name: str
    arguments: tuple[str, ...]
    status: int
    seconds: float
    megabytes: float
    said: str
    fault: str


def run(case: Any, folder: Path) -> Outcome:
    """One case in a process forked from this one, under bounds."""
    folder.mkdir()
    words = case.write(folder)
    (folder / ".work").mkdir()
    child = os.fork()
    if child == 0:
        _inside(words, folder)
    _, status, used = os.wait4(child, 0)
    seconds = used.ru_utime + used.ru_stime
    said = (folder / ".stderr").read_text(errors="replace")
    code = os.waitstatus_to_exitcode(status)
    megabytes = used.ru_maxrss / 1024
    fault = ""
    if "Traceback (most recent call last)" in said:
        fault = "traceback"
    elif code in (-signal.SIGXCPU, -signal.SIGKILL, -signal.SIGALRM):
        fault = "time"
    elif code not in (0, 1, 2):
        fault = f"exit {code}"
    elif megabytes * 2**20 > BYTES:
        fault = "memory"
    elif seconds > SECONDS:
        fault = "time"
    elif code == 2 and len(said) > 4000:
        fault = "long message"
    last = said.strip().splitlines()[-1][-300:] if said.strip() else ""
    shutil.rmtree(folder)
    shown = tuple(word[:80] for word in case.arguments)
    return Outcome(case.name, shown, code, round(seconds, 2), round(megabytes), last, fault)


def _inside(words: list[str], folder: Path) -> None:
    """The child: never returns."""
    code = 70
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS + 1, SECONDS + 2))
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, size + BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(30 * SECONDS)  # waits without using the processor
        for number, name, flags in (
            (0, "/dev/null", os.O_RDONLY),
            (1, str(folder / ".stdout"), os.O_WRONLY | os.O_CREAT),
            (2, str(folder / ".stderr"), os.O_WRONLY | os.O_CREAT),
        ):
            os.dup2(os.open(name, flags), number)
        os.chdir(folder / ".work")
        sys.argv = ["moments", *words]
        from moments.cli import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def warm_up() -> None:
    """Import what commands import, and read what they read, once for all forked processes."""
    import gc

    from typer.testing import CliRunner

    from moments.cli import app

    with tempfile.TemporaryDirectory() as folder:
        before = Path.cwd()
        os.chdir(folder)
        for line in SOUND:
            result = CliRunner().invoke(app, line.split())
            assert result.exit_code in (0, 1), result.output
        os.chdir(before)
    gc.collect()
    gc.freeze()  # so that collections in a child leave the shared pages alone


def mixed(lines: Iterator[Any], configs: Iterator[Any], given: Any) -> Iterator[Any]:
    """Both kinds in turn, so that a campaign that is cut short has its share of each."""
    total = given.lines + given.configs
    for number in range(total):
        before, after = number * given.lines // total, (number + 1) * given.lines // total
        yield next(lines if after > before else configs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--configs", type=int, default=10_000)
    parser.add_argument("--lines", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--output", type=Path, default=None)
    given = parser.parse_args()
    import mutations

    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in LOADED:
        importlib.import_module(name)
    warm_up()
    began = time.monotonic()
    end = began + 60 * given.minutes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workers = []
        for number in range(given.workers):
            child = os.fork()
            if child == 0:
                _worker(given, mutations, folder, number, end)
            workers.append(child)
        for child in workers:
            if os.waitpid(child, 0)[1]:
                raise SystemExit("a worker died")
        files = sorted(folder.glob("outcomes-*.jsonl"))
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    found = summary(rows, given, time.monotonic() - began)
    text = json.dumps(found, indent=1)
    if given.output is not None:
        given.output.write_text(text + "\n", encoding="utf-8")
    print(text)
    for row in found["failures"]:
        print(row["fault"], row["name"], " ".join(row["arguments"]), "|", row["said"])
    sys.exit(1 if found["failures"] else 0)


def _worker(given: Any, mutations: Any, folder: Path, number: int, end: float) -> None:
    """One of several processes, each with its share of both kinds; never returns."""
    code = 1
    try:
        with open(folder / f"outcomes-{number}.jsonl", "w", encoding="utf-8") as file:
            own = folder / f"cases-{number}"
            own.mkdir()
            lines = mutations.command_lines(given.seed, given.lines)
            configs = mutations.configs(given.seed, given.configs)
            for place, case in enumerate(mixed(lines, configs, given)):
                if place % given.workers != number:
                    continue
                if time.monotonic() > end:
                    break
                outcome = run(case, own / str(place))
                file.write(json.dumps(asdict(outcome)) + "\n")
                if outcome.fault:
                    print(outcome, file=sys.stderr, flush=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def summary(rows: list[dict[str, Any]], given: Any, seconds: float) -> dict[str, Any]:
    """What is kept of a campaign."""
    counts = collections.Counter((row["name"].split()[0], str(row["status"])) for row in rows)
    slowest = max(rows, key=lambda row: row["seconds"])
    largest = max(rows, key=lambda row: row["megabytes"])
    return {
        "seed": given.seed,
        "cases": {kind: sum(k == kind for k, _ in counts.elements()) for kind in KINDS},
        "bounds": {"seconds": SECONDS, "megabytes": BYTES // 2**20},
        "exit_statuses": {
            kind: {status: n for (k, status), n in sorted(counts.items()) if k == kind}
            for kind in KINDS
        },
        "slowest": {key: slowest[key] for key in ("name", "arguments", "seconds")},
        "largest": {key: largest[key] for key in ("name", "arguments", "megabytes")},
        "minutes": round(seconds / 60, 1),
        "failures": [row for row in rows if row["fault"]],
    }


if __name__ == "__main__":
    main()
