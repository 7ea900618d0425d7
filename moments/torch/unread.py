"""What can be said of a module that no Transformer describes: faults that show without a model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..errors import MomentsError, optional
from ..show.health import Trouble, ranked
from .behaviour import behaviour
from .dataflow.reading import called
from .dataflow.recurrence import Recurrence, recurrences
from .roles import gathered_names

with optional("torch", "torch"):
    from torch import nn

REMEMBERED = 4.0
"""Tokens that a state has to remember to be more than the convolution before it, whose kernels have
four entries."""


class NotRead(MomentsError):
    """A module that `moments.check` cannot describe.

    Attributes:
        findings: what is wrong with it nonetheless.
    """

    def __init__(self, why: str, findings: tuple[Trouble, ...] = ()) -> None:
        line, *rest = why.split("\n", 1)
        told = "".join(f"; found nonetheless: {finding}" for finding in findings)
        super().__init__("\n".join([line + told, *rest]))
        self.findings = findings


def not_read(module: nn.Module, batch: Any, why: str) -> NotRead:
    """The refusal of a module, with what is found in it all the same."""
    try:
        call, tensors, given = called(module, batch)
        found = [*_forgetting(recurrences(module, call, tensors)), *_random(module, given)]
    except Exception:  # a refusal does not fail over what it could add
        found = []
    return NotRead(why, ranked(found))


def _forgetting(found: list[Recurrence]) -> Iterator[Trouble]:
    short = [r for r in found if r.memory < REMEMBERED]
    if not short:
        return
    worst = min(short, key=lambda r: r.memory)
    low, high = min(r.steps[0] for r in short), max(r.steps[1] for r in short)
    same = {r.alike for r in short}
    alike = f"all entries are {worst.alike:g}: " if len(same) == 1 and None not in same else ""
    names = gathered_names([r.bias for r in short])
    yield Trouble(
        "warning",
        "forgetting",
        names,
        (),
        max(r.memory for r in short),
        REMEMBERED,
        f"{alike}steps of the recurrence lie between {low:.2g} and {high:.2g}, and the state that "
        f"remembers longest is down to 1/e after {max(r.memory for r in short):.2g} tokens",
        "draw steps log-uniformly between .001 and .1 and set the bias to the inverse of softplus",
    )


def _random(module: nn.Module, given: Any) -> Iterator[Trouble]:
    path = behaviour(module, given).random
    if path is not None:
        yield Trouble(
            "error",
            "dropout left on",
            (path,),
            (),
            math.nan,
            math.nan,
            f"in evaluation mode two runs of one input differ, first in what {path} gives",
            "pass training=self.training to functional.dropout, or use nn.Dropout",
        )
