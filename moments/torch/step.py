"""Measurement of one optimizer step of a real module, with which `Prediction.after` is compared.

It shares no formula with the theory: gradients are autograd's, steps those of torch's optimizers,
or of the implementations below for rules that torch lacks (sign, Lion, Muon by matrix).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..errors import DomainError, domain_error, optional
from ..formulas.checks import check_count
from ..prediction.draws import STREAM, Place
from ..step.measured import StepDraw, StepMeasurement
from ..step.rules import OPTIMIZERS, group_of, named_optimizer
from .anatomy import measured_parts
from .measure import Inputs, Loss
from .running import built, hooked, in_mode, restored_buffers, watch_tensor

with optional("torch", "torch"):
    import torch
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

OPTIONS = ("betas", "eps", "weight_decay", "clip", "momentum", "nesterov", "adjust")

Make = Callable[[nn.Module, list[nn.Parameter], float], Callable[[], object]]
"""(module, parameters, learning rate) -> a function that takes one step by their gradients."""


def measure_step(
    module: nn.Module | Callable[[int], nn.Module],
    batch: Any,
    optimizer: Any,
    learning_rate: float | Sequence[float] | None = None,
    *,
    loss: Loss | None = None,
    seeds: int = 1,
    seed: int = 0,
    multipliers: Mapping[str, float] | None = None,
    steps: int = 1,
    progress: bool = False,
    **options: Any,
) -> StepMeasurement | list[StepMeasurement]:
    """Take one optimizer step on a real module and measure the change of every site.

    The module runs in training mode, with the same dropout masks before and after the step; its
    weights, gradients and mode, and torch's random state, are restored.

    Args:
        module: as in `measure`; a factory, called with seed, seed + 1, ..., gives fresh weights for
            every draw.
        batch: keyword arguments of the module, or its one positional argument.
        optimizer: "sgd", "adam", "adamw", "lion", "sign" or "muon" (for each hidden matrix, also
            within fused parameters; Adam for everything else); or a function that makes a
            torch.optim.Optimizer of a list of parameters, with its own rate.
        learning_rate: of a named optimizer; each of several is a first step of its own.
        loss: takes the module's output and the batch, returns a scalar; None: the module's own.
        seeds, seed: draws.
        multipliers: of the learning rate, by parameter or group ("matrices", "embedding", "head",
            "vectors"), as in `Prediction.after`.
        steps: number of steps, each on its own share of the batch's rows, in order; the loss is
            that of the last share, sites are those of all shares, each with the dropout masks of
            its step. Not with multipliers.
        progress: write one line per draw to standard error.
        options: of a named optimizer, as in `Prediction.after`: betas, eps, weight_decay, clip,
            momentum, nesterov, adjust.

    Returns:
        A StepMeasurement, or one for every learning rate.

    Raises:
        DomainError: an unknown optimizer or option, or a rate that is missing or not positive.
        MomentsError: the module could not be read.
    """
    check_count("seeds", seeds)
    check_count("seed", seed, least=0)
    check_count("steps", steps)
    if steps > 1 and multipliers:
        raise DomainError("steps above 1 are without multipliers")
    rates, make, name = _rates(optimizer, learning_rate, multipliers or {}, options)
    draws: list[list[StepDraw]] = [[] for _ in rates]
    source = ""
    for draw in range(seeds):
        with torch.random.fork_rng():
            target = built(module, seed + draw)
            state = int(np.random.SeedSequence((seed, draw)).generate_state(1)[0])
            shares = [batch] if steps == 1 else _shares(batch, steps)
            runs = [_Run(target, share, loss, state + k) for k, share in enumerate(shares)]
            for place, result in enumerate(_steps(target, runs, make, rates, multipliers or {})):
                draws[place].append(result)
        source = type(target).__name__
        if progress:
            print(f"draw {draw + 1} of {seeds}", file=sys.stderr)
    measured = [
        StepMeasurement.from_draws(result, source=source, optimizer=name, learning_rate=rate)
        for rate, result in zip(rates, draws, strict=True)
    ]
    return measured if isinstance(learning_rate, Sequence) else measured[0]


_LINEAR = ("Linear", "Conv1D", "NonDynamicallyQuantizableLinear")


class _Run:
    """A module on a batch; a call returns its loss, its sites and the inputs of its matrices."""

    def __init__(self, module: nn.Module, batch: Any, loss: Loss | None, state: int) -> None:
        self.module, self.state = module, state
        self.inputs = Inputs.of(module, batch, loss)
        self.points, self.parts = measured_parts(module, batch)

    def __call__(self) -> tuple[Tensor, dict[Place, Tensor], dict[str, Tensor]]:
        torch.manual_seed(self.state)
        sites: dict[Place, Tensor] = {}
        inputs: dict[str, Tensor] = {}
        with hooked(self._watch(sites, inputs)):
            result = self.inputs.run("a step")
        if result.logits is not None:
            last = max(layer for layer, site in sites if site == STREAM)
            sites[last + 1, "logits"] = result.logits.detach()
        return result.top, sites, inputs

    def _watch(
        self, sites: dict[Place, Tensor], inputs: dict[str, Tensor]
    ) -> Iterator[RemovableHandle]:
        modules = dict(self.module.named_modules())

        def store_site(place: Place, tensor: Tensor) -> None:
            sites[place] = tensor.detach().clone()

        def store_input(name: str, tensor: Tensor) -> None:
            inputs[name] = tensor.detach()

        for point in self.points:
            store = functools.partial(store_site, (point.layer, point.site))
            yield watch_tensor(modules[point.path], point.side, store)
        for name in {row.parameter for row, _ in self.parts}:
            path, _, kind = name.rpartition(".")
            if kind == "weight" and type(modules.get(path)).__name__ in _LINEAR:
                yield watch_tensor(modules[path], "input", functools.partial(store_input, name))


@contextmanager
def _restored(named: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """Copies of weights; restore weights and gradients after the context."""
    gradients = {name: p.grad for name, p in named.items()}
    old = {name: p.detach().clone() for name, p in named.items()}
    try:
        yield old
    finally:
        _write(named, old)
        for name, p in named.items():
            p.grad = gradients[name]


def _write(named: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(values[name])


def _set_gradients(top: Tensor, named: Mapping[str, nn.Parameter]) -> None:
    result = torch.autograd.grad(top, list(named.values()), allow_unused=True)
    for p, gradient in zip(named.values(), result, strict=True):
        p.grad = torch.zeros_like(p) if gradient is None else gradient


def _steps(
    module: nn.Module,
    runs: Sequence[_Run],
    make: Make,
    rates: list[float],
    multipliers: Mapping[str, float],
) -> Iterator[StepDraw]:
    """The measured steps on all runs at every rate; loss and slope are those of the last run."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    with in_mode(module, True), restored_buffers(module), _restored(named) as old:
        loss_before, before, inputs = _joined(runs)
        _set_gradients(loss_before, named)
        last = {name: p.grad for name, p in named.items() if p.grad is not None}
        for rate in rates:
            for name, p in named.items():
                p.grad = last[name].clone()
            step = make(module, list(named.values()), rate)
            for run in runs:
                if len(runs) > 1:
                    _set_gradients(run()[0], named)
                step()
            moved = {name: p.detach() - old[name] for name, p in named.items()}
            for row, part in runs[-1].parts if multipliers else ():
                group = multipliers.get(group_of(row.weight), 1.0)
                part.of(moved[row.parameter]).mul_(float(multipliers.get(row.weight, group)))
            _write(named, {name: old[name] + moved[name] for name in named})
            with torch.no_grad():
                loss_after, after, _ = _joined(runs)
            _write(named, old)
            yield StepDraw(
                float(loss_before.detach()),
                float(loss_after),
                sum(float((last[name] * moved[name]).sum()) / rate for name in named),
                {place: _squares(before[place], after[place]) for place in before},
                _weights(module, runs[-1].parts, old, moved, last, rate, inputs),
            )


def _joined(runs: Sequence[_Run]) -> tuple[Tensor, dict[Place, Tensor], dict[str, Tensor]]:
    """The last run's loss, and the sites and inputs of all runs, concatenated."""
    losses, sites, inputs = zip(*(run() for run in runs), strict=True)
    return (
        losses[-1],
        {place: torch.cat([run[place] for run in sites]) for place in sites[0]},
        {name: torch.cat([run[name] for run in inputs]) for name in inputs[0]},
    )


def _shares(batch: Any, steps: int) -> list[Any]:
    """The batch's rows in as many equal shares as there are steps."""

    def cut(value: Any) -> list[Any]:
        if len(value) % steps:
            raise DomainError(f"steps = {steps}: the batch has {len(value)} rows, as many for each")
        size = len(value) // steps
        return [value[k * size : (k + 1) * size] for k in range(steps)]

    if isinstance(batch, Mapping):
        parts = {name: cut(value) for name, value in batch.items()}
        return [{name: part[k] for name, part in parts.items()} for k in range(steps)]
    return cut(batch)


def _squares(before: Tensor, after: Tensor) -> tuple[float, float, float]:
    """Mean squares before and after a step, and of the change."""
    a, b = before.double(), after.double()
    return float((a * a).mean()), float((b * b).mean()), float(((b - a) ** 2).mean())


def _weights(
    module: nn.Module,
    parts: list[Any],
    old: Mapping[str, Tensor],
    moved: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    rate: float,
    inputs: Mapping[str, Tensor],
) -> dict[Place, tuple[float, float, float, float]]:
    """Mean squares of every matrix's step and entries, the alignment exponent of the step with the
    matrix's input (0.5: none, 1: full), and its part of the slope."""
    result = {}
    for row, part in parts:
        tensors = (moved, old, gradients)
        step, weight, gradient = (part.of(t[row.parameter]).double() for t in tensors)
        share, size = float((gradient * step).sum()) / rate, float((step * step).mean())
        exponent, x = math.nan, inputs.get(row.parameter)
        if x is not None and size > 0 and step.ndim >= 2:
            owner = module.get_submodule(row.parameter.rpartition(".")[0])
            matrix = step if type(owner).__name__ == "Conv1D" else _flat(step).T
            y, n = x.double() @ matrix, matrix.shape[0]
            ratio = float((y * y).mean() / (x.double() ** 2).mean()) / (size * n)
            exponent = 0.5 + math.log(ratio) / (2 * math.log(n))
        result[row.layer, row.weight] = (size, float((weight * weight).mean()), exponent, share)
    return result


# --- optimizers -----------------------------------------------------------------------------------


def _rates(
    optimizer: Any, rate: Any, multipliers: Mapping[str, float], options: dict[str, Any]
) -> tuple[list[float], Make, str]:
    if not isinstance(optimizer, str):
        if not callable(optimizer):
            allowed = f"one of {', '.join(OPTIMIZERS)}, or a function of parameters"
            raise domain_error("optimizer", optimizer, allowed)
        if multipliers or options:
            raise DomainError("multipliers and options belong to a named optimizer")
        probe = optimizer([nn.Parameter(torch.zeros(2, 2))])
        own = float(probe.param_groups[0]["lr"])
        if rate not in (None, own):
            raise DomainError(f"learning_rate = {rate}: the optimizer's own is {own}; leave it out")
        return [own], lambda _, ps, __: optimizer(ps).step, type(probe).__name__
    for name in set(options) - set(OPTIONS):
        raise domain_error("options", name, f"one of {', '.join(OPTIONS)}")
    named_optimizer(optimizer, multipliers=multipliers, **options)
    if rate is None:
        raise DomainError(f"learning_rate is missing: optimizer {optimizer!r} has none of its own")
    rates = [float(one) for one in (rate if isinstance(rate, Sequence) else [rate])]
    for one in rates:
        if not 0 < one < math.inf:
            raise domain_error("learning_rate", one, "positive and finite")
    return rates, functools.partial(_named, optimizer, options), optimizer


def _named(
    kind: str,
    options: Mapping[str, Any],
    module: nn.Module,
    parameters: list[nn.Parameter],
    rate: float,
) -> Callable[[], object]:
    """A named optimizer, with weight decay (rate times decay) that is not part of the gradient."""
    own = {name: value for name, value in options.items() if name not in ("weight_decay", "clip")}
    decay, clip = rate * float(options.get("weight_decay", 0.0)), options.get("clip")
    optimizer: Any
    if kind == "muon":
        optimizer = _Muon(module, parameters, rate, **own)
    else:
        sign = functools.partial(Lion, betas=(0.0, 0.0))
        kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "lion": Lion, "sign": sign}
        optimizer = kinds.get(kind, torch.optim.Adam)(parameters, lr=rate, **own)

    def step() -> None:
        old = [p.detach().clone() for p in parameters] if decay else []
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        with torch.no_grad():
            for p, value in zip(parameters, old, strict=False):
                p.sub_(decay * value)

    return step


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, Algorithm 2, without decay; with betas of 0, the sign of the gradient."""

    def __init__(
        self, parameters: list[nn.Parameter], lr: float, betas: tuple[float, float] = (0.9, 0.99)
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                beta1, beta2 = group["betas"]
                for p in group["params"]:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    p.sub_(group["lr"] * torch.lerp(p.grad, average, beta1).sign())
                    average.lerp_(p.grad, 1 - beta2)


class _Muon:
    """Jordan's Muon for each hidden matrix, Adam for everything else."""

    def __init__(
        self,
        module: nn.Module,
        parameters: list[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        nesterov: bool | None = None,
        adjust: str = "original",
        **adam: Any,
    ) -> None:
        self.module, self.rate, self.momentum, self.adjust = module, lr, momentum, adjust
        self.parts = measured_parts(module, None)[1]
        self.nesterov = momentum > 0 if nesterov is None else nesterov
        self.adam = torch.optim.Adam(parameters, lr=lr, **adam)
        self.averages = {id(p): torch.zeros_like(p) for p in parameters}

    def step(self) -> None:
        parameters = dict(self.module.named_parameters())
        old = {name: p.detach().clone() for name, p in parameters.items()}
        self.adam.step()
        for row, part in self.parts:
            p = parameters[row.parameter]
            if id(p) not in self.averages or p.grad is None or group_of(row.weight) != "matrices":
                continue
            average, gradient = part.of(self.averages[id(p)]), part.of(p.grad)
            if gradient.ndim < 2:
                continue
            average.lerp_(gradient, 1 - self.momentum)
            update = average.clone()
            if self.nesterov:
                update = torch.lerp(gradient, average, self.momentum)
            update = _muon(self.module, row.parameter, update, self.adjust)
            with torch.no_grad():
                part.of(p.detach()).copy_(part.of(old[row.parameter]) - self.rate * update)


def _muon(module: nn.Module, name: str, g: Tensor, adjust: str) -> Tensor:
    """Jordan's Newton-Schulz iteration of a matrix, a part of the parameter of that name."""
    x = _flat(g) / (g.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(5):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    x = x.T if tall else x
    owner = module.get_submodule(name.rpartition(".")[0])
    m, n = reversed(x.shape) if type(owner).__name__ == "Conv1D" else x.shape
    scale = {
        "original": max(1.0, m / n) ** 0.5,
        "match_rms_adamw": 0.2 * max(m, n) ** 0.5,
        "spectral": (m / n) ** 0.5,
    }[adjust]
    return scale * x.reshape(g.shape)


def _flat(part: Tensor) -> Tensor:
    """A part of a parameter as a matrix, without an axis of heads."""
    return part.reshape(-1, part.shape[-1])
