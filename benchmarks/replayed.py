"""Whether recording a layer on classes of positions, and replaying it, would pay.

    python benchmarks/replayed.py      # measures and stores, two minutes

Layers of tokens alike are replayed (`moments/engine/program.py`), those on classes are not. Here
every call of numpy that predictions of two and of four layers make is noted, with the arrays it was
made on, and the calls are made again, one after the other, into arrays that are there already: what
is left is what a program would cost at best, without its guards, its numbers and its records. To
write the lines down and have Python compile them is what a program costs at least. And the ways
that layers take are counted, each of which is a program of its own: how often an iteration runs and
which branch is taken belong to a way. Processor time of one thread, the least of several runs.
"""

from __future__ import annotations

import itertools
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import speed

import moments
from moments.engine.composition import Layer
from moments.engine.state import Kernel
from moments.prediction.stack import Stack

DATA = Path(__file__).parent / "data" / "replayed.json"
CASES = {
    "causal, 256 tokens": (speed.CAUSAL, (24, 96)),
    "causal, 256 tokens, scaled norms": (speed.CAUSAL.replace(layernorm_scaling=True), (24, 96)),
    "GPT-2, 1024 tokens": (moments.preset("gpt2"), (12,)),
    "Llama-3-8B, 8192 tokens": (moments.preset("llama-3-8b", seq_len=8192), (32,)),
}
RUNS = 30


class Call(NamedTuple):
    """What was called, on what, and what came of it."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    found: Any


class Noted(np.ndarray):
    """An array whose uses are noted, and those of all that is made of it."""

    calls: list[Call] | None = None

    def __array_ufunc__(self, ufunc: Any, method: str, *arguments: Any, **options: Any) -> Any:
        function = ufunc if method == "__call__" else getattr(ufunc, method)
        found = _note(function, arguments, options)
        (out, *_) = options.get("out") or (None,)
        return _noted(found) if out is None else out

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        return _noted(_note(function, arguments, options))


def _note(function: Any, arguments: Any, options: Any) -> Any:
    arguments, options = _plain(tuple(arguments)), _plain(dict(options))
    found = function(*arguments, **options)
    if Noted.calls is not None:
        Noted.calls.append(Call(function, arguments, options, found))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Noted):
        return value.view(np.ndarray)
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return {k: _plain(v) for k, v in value.items()} if type(value) is dict else value


def _noted(value: Any) -> Any:
    if type(value) is np.ndarray:
        return value.view(Noted)
    return type(value)(map(_noted, value)) if type(value) in (list, tuple) else value


def calls_of(model: moments.Transformer) -> tuple[list[Call], list[int]]:
    """The calls of a prediction, and how many there were before each layer's way up."""
    enter, propagate, starts = Stack.enter, Layer.propagate, list[int]()

    def entered(self: Stack, *given: Any, **options: Any) -> Any:
        signal = enter(self, *given, **options)
        kernel = signal.kernel
        own, pairs = (np.array(one).view(Noted) for one in (kernel.diagonal, kernel.pairs))
        return signal.replace(kernel=Kernel(own, pairs, kernel.resolved))

    def counted(self: Layer, *given: Any) -> Any:
        starts.append(len(Noted.calls or ()))
        return propagate(self, *given)

    Noted.calls = calls = []
    try:
        with patch.object(Stack, "enter", entered), patch.object(Layer, "propagate", counted):
            moments.predict(model)
    finally:
        Noted.calls = None
    return calls, starts


def again(calls: list[Call]) -> Callable[[], None]:
    """The calls as straight lines, into the arrays that came of them where numpy takes one."""
    names: dict[str, Any] = {}
    lines = ["pass"]
    for k, call in enumerate(calls):
        options = dict(call.options)
        ufunc = isinstance(getattr(call.function, "__self__", call.function), np.ufunc)
        made = isinstance(call.found, np.ndarray) and call.found.base is None  # and is no view
        if (ufunc or call.function is np.einsum) and made and "out" not in options:
            options["out"] = call.found
        given = [f"a{k}_{n}" for n in range(len(call.arguments))]
        names |= dict(zip(given, call.arguments, strict=True)) | {f"f{k}": call.function}
        for name, value in options.items():
            names[f"o{k}_{name}"] = value
            given.append(f"{name}=o{k}_{name}")
        lines.append(f"f{k}({','.join(given)})")
    body = "\n ".join(lines)
    exec(compile(f"def run():\n {body}", "<calls of numpy>", "exec"), names)
    run: Callable[[], None] = names["run"]
    return run


def least(*works: Callable[[], Any], runs: int = RUNS) -> list[float]:
    """Of each, all in turn."""
    found: list[list[float]] = [[] for _ in works]
    for _ in range(runs):
        for work, costs in zip(works, found, strict=True):
            start = time.process_time()
            work()
            costs.append(time.process_time() - start)
    return [min(costs) for costs in found]


def ways(model: moments.Transformer) -> int:
    """How many there are through the model's layers, upwards."""
    calls, starts = calls_of(model)
    layers = itertools.pairwise(starts)
    return len(
        {
            tuple((_name(call.function), np.shape(call.found)) for call in calls[low:high])
            for low, high in layers
        }
    )


def _name(function: Any) -> tuple[str, str]:
    return getattr(function, "__name__", ""), str(getattr(function, "__self__", ""))


def measured(model: moments.Transformer, depths: tuple[int, ...]) -> dict[str, Any]:
    short, long = model.replace(layers=2), model.replace(layers=4)
    calls_of(short)  # fills tables
    few, many = calls_of(short)[0], calls_of(long)[0]
    writing_two, writing_four = least(lambda: again(few), lambda: again(many), runs=5)
    with np.errstate(all="ignore"):
        two, four, again_two, again_four = least(
            lambda: moments.predict(short), lambda: moments.predict(long), again(few), again(many)
        )
    return {
        "calls": (len(many) - len(few)) / 2,
        "milliseconds": 500 * (four - two),
        "replayed": 500 * (again_four - again_two),
        "written": 500 * (writing_four - writing_two),
        "ways": {str(depth): ways(model.replace(layers=depth)) for depth in depths},
    }


def main() -> None:
    warnings.simplefilter("ignore", moments.ValidityWarning)
    found = {name: measured(*case) for name, case in CASES.items()}
    text = json.dumps({"layers": found, "machine": speed.machine()}, indent=1)
    DATA.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
