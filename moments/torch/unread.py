"""What can be said of a module that no Transformer describes: faults that show without a model.

State-space layers and gated linear attention multiply a state by exp(-step A) at every token, with
step = softplus(x + b) and A > 0 a parameter. Steps are drawn between .001 and .1 (Gu and Dao 2023,
arXiv:2312.00752, section 3.6); a bias b of ones or zeros forgets the state at the next token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..errors import MomentsError
from ..show.findings import Finding, ranked
from .dataflow.graph import VIEWS, Graph, record
from .dataflow.reading import called
from .entering import random_part
from .roles import gathered_names
from .running import in_mode, kept_buffers

# --- recurrences ----------------------------------------------------------------------------------

_PASSING = (*VIEWS, "clamp", "clamp_min", "clamp_max", "repeat", "repeat_interleave", "index")


class Recurrence(NamedTuple):
    """One recurrence: the bias of its step, the number that all its entries are (None where they
    differ), the smallest and largest step, and the tokens after which the longest memory is down to
    1/e.
    """

    bias: str
    alike: float | None
    steps: tuple[float, float]
    memory: float


def recurrences(module: nn.Module, call: Any, batch: dict[str, Tensor]) -> Iterator[Recurrence]:
    """Of one call of a module."""
    graph = record(module, call, batch)
    for node in graph.nodes:
        if node.name != "softplus" or not graph.values[node.outputs[0]].live:
            continue
        bias = _bias(graph, node.inputs[0])
        decay = _decay(graph, node.outputs[0])
        if bias is None or decay is None:
            continue
        held = graph.tensor(bias).detach().double().flatten()
        steps = graph.tensor(node.outputs[0]).detach().double()
        same = held.numel() > 1 and float(held.max() - held.min()) <= 1e-6
        yield Recurrence(
            str(graph.values[bias].name),
            float(held[0]) if same else None,
            (float(steps.min()), float(steps.max())),
            float(1 / (-decay).clamp(min=1e-12).min()),
        )


def _bias(graph: Graph, value: int) -> int | None:
    """The parameter that was added to a value on its way."""
    node = graph.producer(value)
    while node is not None:
        for other in node.inputs:
            constant, leaf, name = graph.values[other], _leaf(graph, other), node.name.rstrip("_")
            adds = name == "add" or (name == "addmm" and node.inputs[0] == other)
            if not constant.live and constant.params and leaf is not None and adds:
                return leaf
        if node.name not in _PASSING or not node.inputs:
            return None
        node = graph.producer(node.inputs[0])
    return None


def _leaf(graph: Graph, value: int) -> int | None:
    """The parameter that a constant is, or is a view or a copy of."""
    whole = [leaf for leaf in graph.leaves(value) if graph.values[leaf].name]
    viewed = all(node.name in VIEWS for node in graph.makers(value))
    return whole[0] if viewed and len(whole) == 1 else None


def _decay(graph: Graph, steps: int) -> Tensor | None:
    """Logarithms of what the state keeps per token: steps times a negative constant."""
    waiting, seen = [steps], set()
    while waiting:
        value = waiting.pop()
        for index in graph.values[value].consumers:
            node = graph.nodes[index]
            if index in seen:
                continue
            seen.add(index)
            rest = [v for v in node.inputs if v != value]
            if node.name.rstrip("_") == "mul" and len(rest) == 1:
                held = graph.values[rest[0]]
                if not held.live and held.params and bool((held.tensor < 0).all()):
                    return graph.tensor(node.outputs[0]).detach().double()
            if node.name in _PASSING:
                waiting += node.outputs
    return None


# --- what is not read -----------------------------------------------------------------------------

REMEMBERED = 4.0
"""Tokens that a state has to remember to be more than the convolution of four before it."""


class NotRead(MomentsError):
    """A module that `moments.check` cannot describe.

    Attributes:
        findings: what is wrong with it nonetheless.
    """

    def __init__(self, why: str, findings: tuple[Finding, ...] = ()) -> None:
        line, *rest = why.split("\n", 1)
        told = "".join(f"; found nonetheless: {finding}" for finding in findings)
        super().__init__("\n".join([line + told, *rest]))
        self.findings = findings


def not_read(module: nn.Module, batch: Any, why: str) -> NotRead:
    """The refusal of a module, with what is found in it all the same."""
    try:
        near, call, passed, given = called(module, batch)
        with kept_buffers(near), in_mode(near, True):
            found = [*_forgetting(list(recurrences(near, call, passed)))]
        found += random_outcome(random_part(module, given))
    except Exception:  # a refusal does not fail over what it could add
        found = []
    return NotRead(why, ranked(found))


def _forgetting(found: list[Recurrence]) -> Iterator[Finding]:
    short = [r for r in found if r.memory < REMEMBERED]
    if not short:
        return
    worst = min(short, key=lambda r: r.memory)
    low, high = min(r.steps[0] for r in short), max(r.steps[1] for r in short)
    same = {r.alike for r in short}
    alike = f"all entries are {worst.alike:g}: " if len(same) == 1 and None not in same else ""
    names, longest = gathered_names([r.bias for r in short]), max(r.memory for r in short)
    why = (
        f"{alike}steps of the recurrence lie between {low:.2g} and {high:.2g}, and the state that "
    )
    why += f"remembers longest is down to 1/e after {longest:.2g} tokens"
    mend = (
        "draw steps log-uniformly between .001 and .1 and set the bias to the inverse of softplus"
    )
    yield Finding("warning", "forgetting", names, (), longest, REMEMBERED, why, mend)


def random_outcome(path: str | None) -> Iterator[Finding]:
    """What is wrong where runs in evaluation mode differ, first in what a submodule gives."""
    if path is not None:
        yield Finding(
            "error",
            "dropout left on",
            (path,),
            reason="in evaluation mode two runs of one input differ, first in what "
            f"{path} gives: dropout, or another draw, acts where it should not",
            mend="pass training=self.training to functional.dropout (dropout_p = p if "
            "self.training else 0 to scaled_dot_product_attention), or use nn.Dropout",
        )
