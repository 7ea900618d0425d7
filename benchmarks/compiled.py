"""Whether compiling a layer's recorded program pays: numba against the straight lines of Python.

    python benchmarks/compiled.py      # measures and stores; needs `pip install numba`

A program is what `moments/engine/program.py` records of a layer and replays. Measured is its way up
alone, arithmetic and guards; what stands on its tape as one operation (a table that is read) is
called from outside, since numba cannot. Processor time of one thread, the least of several runs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import speed

import moments
from moments.engine import program as programs

DATA = Path(__file__).parent / "data" / "compiled.json"
MANY = 10_000


def recorded() -> programs.Program:
    """The program of a Pre-LN layer of tokens alike."""
    moments.predict(speed.ALIKE.replace(layers=192))
    return [one for found in programs.LIBRARY._programs.values() for one in found][-1]


def straight(program: programs.Program) -> tuple[Callable[..., int], Any, int]:
    """The way up as a function of numbers, of what its one whole operation gives and of an array
    that takes what it keeps; that operation, with its operands' values; and how many it keeps."""
    ahead, tape = program.ahead(False), program._tape
    leaving = [v.line.place for v in program._leaving if type(v) is programs.Recorded]
    wanted = sorted({*leaving, *ahead.kept})
    guards = program._guards
    needed = programs._needed(tape.operations, [*wanted, *(g.line.place for g in guards)])
    (whole,) = (k for k in sorted(needed) if tape.operations[k].name == "whole")
    text = programs._Text(tape.operations, needed, False, wanted)
    body = text.statements(0, program._split, guards)
    lines = [one for one in body if not one.startswith(f"x{whole}=")]
    called = next(one for one in body if one.startswith(f"x{whole}="))
    names = [text.name(one) for one in program._entering]
    at = [k for k in wanted if k != whole]
    kept = [f"out[{n}]=x{k}" for n, k in enumerate(at)]
    lines = [one.replace("return None", "return 1") for one in lines]
    head = f"def ahead({','.join(names)},x{whole},out):"
    source = "\n ".join([head, *lines, *kept, "return 0"])
    environment = text.environment | {
        name: getattr(math, name)
        for name in ("sqrt", "exp", "isinf", "asin")
        if hasattr(math, name)
    }
    exec(source, environment)
    read = re.fullmatch(r"x\d+=(\w+)\.number\((.*)\)", called)
    if read is None:
        raise SystemExit(f"a recorded operation reads otherwise than here: {called}")
    values = _values(program, read[1], read[2], text)
    return environment["ahead"], values, len(at)


def _values(program: programs.Program, function: str, operands: str, text: Any) -> Any:
    """The whole operation as it was called when the program's own numbers were replayed."""
    called: list[Any] = []
    whole = text.environment[function]
    plain = whole.number

    def note(*values: Any) -> Any:
        called.append((whole, values))
        return plain(*values)

    whole.number = note
    try:
        program.ahead(False).function(*(v.value for v in program._entering))
    finally:
        whole.number = plain
    return called[0]


def cost(work: Callable[[], Any], times: int) -> float:
    found = []
    for _ in range(7):
        start = time.process_time()
        for _ in range(times):
            work()
        found.append((time.process_time() - start) / times)
    return min(found)


def measured() -> dict[str, Any]:
    numba = importlib.import_module("numba")
    program = recorded()
    function, (table, operands), size = straight(program)
    whole = table.number
    numbers = [float(v.value) for v in program._entering]
    given, out = np.array(whole(*operands), dtype=float), np.zeros(size)
    plain = program.ahead(False).function
    start = time.process_time()
    compiled = numba.njit(function)
    if compiled(*numbers, given, out):
        raise SystemExit("a guard does not hold on the program's own numbers")
    compiling = time.process_time() - start
    arguments = ",".join(f"numbers[{n},b]" for n in range(len(numbers)))
    environment = {"compiled": compiled}
    exec(
        "def loop(numbers,given,out):\n for b in range(numbers.shape[1]):\n"
        f"  compiled({arguments},given[b],out[b])",
        environment,
    )
    loop = numba.njit(environment["loop"])
    columns = np.repeat(np.array(numbers)[:, None], MANY, 1)
    several = np.repeat(given[None], MANY, 0), np.zeros((MANY, size))
    loop(columns, *several)
    signal = programs.Passage(programs.LIBRARY, moments.predict(speed.ALIKE).trace.entering)
    own = len(numbers) - len(signal.signals[0][1])  # a layer's parameters stand before the signal
    arrays = [np.full(MANY, v) if n >= own else v for n, v in enumerate(numbers)]
    scale, correlation, *rest = operands
    columns_of = [scale, np.full(MANY, correlation), *rest]
    buffered = program.ahead(True).function
    buffered(*arrays)
    versions = {name: importlib.metadata.version(name) for name in ("numba", "llvmlite")}
    return {
        "lines": len(program._tape.operations[: program._split]),
        "microseconds": {
            "Python, straight lines": 1e6 * cost(lambda: plain(*numbers), 300),
            "of which one table read": 1e6 * cost(lambda: whole(*operands), 300),
            "numba, without that": 1e6 * cost(lambda: compiled(*numbers, given, out), 3000),
            "numpy, each of 10,000 configurations": 1e6 * cost(lambda: buffered(*arrays), 2) / MANY,
            "of which the table": 1e6 * cost(lambda: table.array(*columns_of), 2) / MANY,
            "numba, each of 10,000, without the table": 1e6
            * cost(lambda: loop(columns, *several), 2)
            / MANY,
        },
        "seconds to compile": compiling,
        "machine": speed.machine() | versions,
    }


if __name__ == "__main__":
    DATA.write_text(json.dumps(measured(), indent=1) + "\n", encoding="utf-8")
    print(DATA.read_text(encoding="utf-8"))
