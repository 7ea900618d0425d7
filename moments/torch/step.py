"""One real optimizer step of a real module, measured: the referee of `Prediction.after`.

Shares no formula with the theory: gradients are autograd's, steps torch's own optimizers', or for
rules that torch lacks (sign, Lion, Muon by matrix) the few lines below.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from ..errors import DomainError, domain_error, optional
from ..formulas.checks import check_count
from ..prediction.draws import STREAM
from ..step.measured import Place, StepDraw, StepMeasurement
from ..step.rules import group_of
from .hook_points import HookPoint, hook_points, weight_parts
from .measure import Loss, _add_labels, _built, _objective, _tensors
from .running import in_mode, module_logits, unwrapped, watch_tensor

with optional("torch", "torch"):
    import torch
    from torch import Tensor, nn

OPTIMIZERS = ("sgd", "adam", "adamw", "lion", "sign", "muon")

Update = Callable[[nn.Module, float], dict[str, Tensor]]
"""From a module with gradients and a learning rate to the change of every parameter."""


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
    """Take one optimizer step on a real module and measure what it did to every site.

    The module runs in training mode, dropout's masks being the same before and after the step; its
    weights, gradients and mode, and torch's random state, are left as they were.

    Args:
        module: as in `measure`; a factory, called with seed, seed + 1, ..., gives fresh weights for
            every draw.
        batch: keyword arguments of the module, or its one positional argument.
        optimizer: "sgd", "adam", "adamw", "lion", "sign" or "muon" (each hidden matrix by
            itself, what is fused taken apart; everything else by Adam); or a function that makes
            a torch.optim.Optimizer of a list of parameters, whose rate is its own.
        learning_rate: of a named optimizer; of several, each is a first step of its own.
        loss: takes the module's output and the batch, returns a scalar; None: the module's own.
        seeds, seed: draws.
        multipliers: of the learning rate, by parameter or group ("matrices", "embedding", "head",
            "vectors"), as in `Prediction.after`.
        steps: of the optimizer, each on its own share of the batch's rows, in order; the loss is
            that of the last share, sites are those of all shares, each under the dropout masks of
            its step. Without multipliers.
        progress: write one line per draw to standard error.
        options: of a named optimizer: betas, eps, weight_decay, momentum, nesterov, adjust. Muon's
            momentum is .95 by Nesterov, as its author's, where nothing is given.

    Returns:
        A StepMeasurement, or one for every learning rate.

    Raises:
        DomainError: an unknown optimizer or option, or a rate that is missing or not positive.
        MomentsError: the module's layers are not known.
    """
    check_count("seeds", seeds)
    check_count("seed", seed, least=0)
    check_count("steps", steps)
    if steps > 1 and multipliers:
        raise DomainError("steps above 1 are without multipliers")
    rates, update, name = _rates(optimizer, learning_rate, multipliers or {}, options)
    make = _made(optimizer, options) if steps > 1 else None
    draws: list[list[StepDraw]] = [[] for _ in rates]
    source = ""
    for draw in range(seeds):
        with torch.random.fork_rng():
            target = module if isinstance(module, nn.Module) else _built(module, seed + draw)
            target = unwrapped(target)
            state = int(np.random.SeedSequence((seed, draw)).generate_state(1)[0])
            if make is None:
                taken = _steps(target, batch, loss, update, rates, state)
            else:
                taken = _several(target, batch, loss, make, rates, state, steps)
            for place, found in enumerate(taken):
                draws[place].append(found)
        source = type(target).__name__
        if progress:
            print(f"draw {draw + 1} of {seeds}", file=sys.stderr)
    measured = [
        StepMeasurement.from_draws(found, source=source, optimizer=name, learning_rate=rate)
        for rate, found in zip(rates, draws, strict=True)
    ]
    return measured if isinstance(learning_rate, Sequence) else measured[0]


class _Seen:
    """A module on a batch, with what passes its sites."""

    def __init__(self, module: nn.Module, inputs: Any, loss: Loss | None, state: int) -> None:
        self.module, self.inputs, self.loss, self.state = module, inputs, loss, state
        self.points, self.parts = hook_points(module), weight_parts(module)

    def __call__(self) -> tuple[Tensor, dict[Place, Tensor], dict[str, Tensor]]:
        torch.manual_seed(self.state)
        sites: dict[Place, Tensor] = {}
        entering: dict[str, Tensor] = {}
        with _seen(self.module, self.points, self.parts, sites, entering):
            output = self.module(*self.inputs.positional, **self.inputs.named)
        top, cotangent = _objective(output, self.inputs, self.loss)
        if cotangent is not None:
            raise DomainError("a step needs a loss: pass labels in the batch, or a loss")
        logits = module_logits(output)
        if logits is not None:
            last = max(layer for layer, site in sites if site == STREAM)
            sites[last + 1, "logits"] = logits.detach()
        return top, sites, entering


@contextmanager
def _kept(named: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """Weights and gradients, put back at the end."""
    gradients = {name: p.grad for name, p in named.items()}
    old = {name: p.detach().clone() for name, p in named.items()}
    try:
        yield old
    finally:
        _restore(named, old)
        for name, p in named.items():
            p.grad = gradients[name]


def _restore(named: Mapping[str, nn.Parameter], old: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(old[name])


def _set_gradients(top: Tensor, named: Mapping[str, nn.Parameter]) -> None:
    found = torch.autograd.grad(top, list(named.values()), allow_unused=True)
    for p, gradient in zip(named.values(), found, strict=True):
        p.grad = torch.zeros_like(p) if gradient is None else gradient


def _read(module: nn.Module, batch: Any, loss: Loss | None) -> Any:
    inputs = _tensors(module, batch)
    if loss is None:
        _add_labels(module, inputs)
    return inputs


def _steps(
    module: nn.Module, batch: Any, loss: Loss | None, update: Update, rates: list[float], state: int
) -> Iterator[StepDraw]:
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    run = _Seen(module, _read(module, batch, loss), loss, state)
    with in_mode(module, True), _kept(named) as old:
        top, before, entering = run()
        _set_gradients(top, named)
        for rate in rates:
            moved = update(module, rate)
            slope = {name: float((p.grad * moved[name]).sum()) / rate for name, p in named.items()}
            with torch.no_grad():
                for name, p in named.items():
                    p.copy_(old[name] + moved[name])
                after_loss, after, _ = run()
            _restore(named, old)
            yield StepDraw(
                float(top.detach()),
                float(after_loss),
                sum(slope.values()),
                {place: _squares(before[place], after[place]) for place in before},
                _weights(module, run.parts, old, moved, rate, entering),
            )


def _several(
    module: nn.Module,
    batch: Any,
    loss: Loss | None,
    make: Callable[[nn.Module, list[nn.Parameter], float], Any],
    rates: list[float],
    state: int,
    steps: int,
) -> Iterator[StepDraw]:
    """Every step on its share of the batch; the loss is the last share's."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    shares = [
        _Seen(module, _read(module, share, loss), loss, state + k)
        for k, share in enumerate(_shares(batch, steps))
    ]
    with in_mode(module, True), _kept(named) as old:
        loss_before, before, entering = _joined(shares)
        _set_gradients(loss_before, named)
        last = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        for rate in rates:
            optimizer = make(module, list(named.values()), rate)
            for share in shares:
                top, *_ = share()
                _set_gradients(top, named)
                optimizer.step()
            moved = {name: p.detach() - old[name] for name, p in named.items()}
            with torch.no_grad():
                after_loss, after, _ = _joined(shares)
            _restore(named, old)
            for name, p in named.items():
                p.grad = last[name]  # shares of the slope are those of the last loss
            yield StepDraw(
                float(loss_before.detach()),
                float(after_loss),
                sum(float((last[name] * moved[name]).sum()) / rate for name in named),
                {place: _squares(before[place], after[place]) for place in before},
                _weights(module, shares[-1].parts, old, moved, rate, entering),
            )


def _joined(shares: Sequence[_Seen]) -> tuple[Tensor, dict[Place, Tensor], dict[str, Tensor]]:
    """The last share's loss, and what passes the sites of all, share by share."""
    runs = [share() for share in shares]
    sites = {place: torch.cat([run[1][place] for run in runs]) for place in runs[0][1]}
    entering = {name: torch.cat([run[2][name] for run in runs]) for name in runs[0][2]}
    return runs[-1][0], sites, entering


def _shares(batch: Any, steps: int) -> list[Any]:
    """The batch's rows, as many for every step."""

    def cut(value: Any) -> list[Any]:
        if len(value) % steps:
            raise DomainError(f"steps = {steps}: the batch has {len(value)} rows, as many for each")
        size = len(value) // steps
        return [value[k * size : (k + 1) * size] for k in range(steps)]

    if isinstance(batch, Mapping):
        parts = {name: cut(value) for name, value in batch.items()}
        return [{name: part[k] for name, part in parts.items()} for k in range(steps)]
    return cut(batch)


class _Sign(torch.optim.Optimizer):
    """The sign of the gradient, times the rate."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(group["lr"] * p.grad.sign())


class _Lion(torch.optim.Optimizer):
    """Chen et al. 2023, Algorithm 2."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "decay": weight_decay})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                (one, two), rate = group["betas"], group["lr"]
                for p in group["params"]:
                    past = self.state[p].setdefault("past", torch.zeros_like(p))
                    update = torch.lerp(p.grad, past, one).sign()
                    p.sub_(rate * (update + group["decay"] * p))
                    past.lerp_(p.grad, 1 - two)


class _Muon:
    """Jordan's Muon on each hidden matrix by itself, everything else by Adam."""

    def __init__(
        self,
        module: nn.Module,
        parameters: list[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust: str = "original",
        weight_decay: float = 0.0,
        **adam: Any,
    ) -> None:
        self.module, self.rate, self.decay = module, lr, weight_decay
        self.momentum, self.nesterov, self.adjust = momentum, nesterov, adjust
        self.adam = torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, **adam)
        self.past = {id(p): torch.zeros_like(p) for p in parameters}

    def step(self) -> None:
        parameters = dict(self.module.named_parameters())
        old = {name: p.detach().clone() for name, p in parameters.items()}
        self.adam.step()
        for row, part in weight_parts(self.module):
            p = parameters[row.parameter]
            if id(p) not in self.past or p.grad is None or group_of(row.weight) != "matrices":
                continue
            if part.of(p.grad).ndim < 2:
                continue
            past, gradient = part.of(self.past[id(p)]), part.of(p.grad)
            past.lerp_(gradient, 1 - self.momentum)
            update = torch.lerp(gradient, past, self.momentum) if self.nesterov else past.clone()
            update = _muon(self.module, row.parameter, update, self.adjust)
            with torch.no_grad():
                kept = (1 - self.rate * self.decay) * part.of(old[row.parameter])
                part.of(p.detach()).copy_(kept - self.rate * update)


def _made(
    optimizer: Any, options: dict[str, Any]
) -> Callable[[nn.Module, list[nn.Parameter], float], Any]:
    """torch's own optimizer of a name."""
    if not isinstance(optimizer, str):
        return lambda module, parameters, _: optimizer(parameters)
    if optimizer == "muon":
        return lambda module, parameters, rate: _Muon(module, parameters, rate, **options)
    kinds = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": functools.partial(torch.optim.AdamW, weight_decay=0.0),
        "lion": _Lion,
        "sign": _Sign,
    }
    return lambda module, parameters, rate: kinds[optimizer](parameters, lr=rate, **options)


def _squares(before: Tensor, after: Tensor) -> tuple[float, float, float]:
    a, b = before.double(), after.double()
    return float((a * a).mean()), float((b * b).mean()), float(((b - a) ** 2).mean())


def _weights(
    module: nn.Module,
    parts: list[Any],
    old: Mapping[str, Tensor],
    moved: Mapping[str, Tensor],
    rate: float,
    entering: Mapping[str, Tensor],
) -> dict[Place, tuple[float, float, float, float]]:
    found = {}
    parameters = dict(module.named_parameters())
    for row, part in parts:
        step, weight = (part.of(t[row.parameter]).double() for t in (moved, old))
        gradient = parameters[row.parameter].grad
        assert gradient is not None
        share = float((part.of(gradient).double() * step).sum()) / rate
        size = float((step * step).mean())
        exponent = math.nan
        x = entering.get(row.parameter)
        if x is not None and size > 0 and step.ndim >= 2:
            owner = module.get_submodule(row.parameter.rpartition(".")[0])
            matrix = step if type(owner).__name__ == "Conv1D" else _flat(step).T
            y, n = x.double() @ matrix, matrix.shape[0]
            ratio = float((y * y).mean() / (x.double() ** 2).mean()) / (size * n)
            exponent = 0.5 + math.log(ratio) / (2 * math.log(n))
        found[row.layer, row.weight] = (size, float((weight * weight).mean()), exponent, share)
    return found


@contextmanager
def _seen(
    module: nn.Module,
    points: Sequence[HookPoint],
    parts: list[Any],
    sites: dict[Place, Tensor],
    entering: dict[str, Tensor],
) -> Iterator[None]:
    """Keep every site's tensor, and what enters every matrix."""
    modules = dict(module.named_modules())
    with ExitStack() as hooks:
        for point in points:
            place = point.layer, point.site
            keep = functools.partial(_copy, sites, place)
            hooks.callback(watch_tensor(modules[point.path], point.side, keep).remove)
        for name in {row.parameter for row, _ in parts}:
            path, _, kind = name.rpartition(".")
            owner = modules.get(path)
            if kind != "weight" or owner is None or type(owner).__name__ not in _LINEAR:
                continue
            keep = functools.partial(_keep, entering, name)
            hooks.callback(watch_tensor(owner, "input", keep).remove)
        yield


def _copy(held: dict[Any, Tensor], name: Any, tensor: Tensor) -> None:
    held[name] = tensor.detach().clone()


def _keep(held: dict[Any, Tensor], name: Any, tensor: Tensor) -> None:
    held[name] = tensor.detach()


_LINEAR = ("Linear", "Conv1D", "NonDynamicallyQuantizableLinear")


# --- optimizers -----------------------------------------------------------------------------------


def _rates(
    optimizer: Any, rate: Any, multipliers: Mapping[str, float], options: dict[str, Any]
) -> tuple[list[float], Update, str]:
    if not isinstance(optimizer, str):
        if not callable(optimizer):
            allowed = f"one of {', '.join(OPTIMIZERS)}, or a function of parameters"
            raise domain_error("optimizer", optimizer, allowed)
        if multipliers or options:
            raise DomainError("multipliers and options belong to a named optimizer")
        probe = optimizer([nn.Parameter(torch.zeros(2, 2))])
        given = float(probe.param_groups[0]["lr"])
        if rate not in (None, given):
            raise DomainError(
                f"learning_rate = {rate}: the optimizer's own is {given}; leave it out"
            )
        return [given], _by_torch(lambda parameters, _: optimizer(parameters)), type(probe).__name__
    if optimizer not in OPTIMIZERS:
        raise domain_error("optimizer", optimizer, f"one of {', '.join(OPTIMIZERS)}")
    if rate is None:
        raise DomainError(f"learning_rate is missing: optimizer {optimizer!r} has none of its own")
    rates = [float(one) for one in (rate if isinstance(rate, Sequence) else [rate])]
    for one in rates:
        if not 0 < one < math.inf:
            raise domain_error("learning_rate", one, "positive and finite")
    return rates, _named(optimizer, dict(options), multipliers), optimizer


def _by_torch(make: Callable[[list[nn.Parameter], float], Any]) -> Update:
    def update(module: nn.Module, rate: float) -> dict[str, Tensor]:
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        old = {name: p.detach().clone() for name, p in named.items()}
        make(list(named.values()), rate).step()
        moved = {name: p.detach() - old[name] for name, p in named.items()}
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(old[name])
        return moved

    return update


def _named(kind: str, options: dict[str, Any], multipliers: Mapping[str, float]) -> Update:
    """A named optimizer; the whole step of every part of a parameter times its multiplier."""
    decay = float(options.pop("weight_decay", 0.0))
    adjust = str(options.pop("adjust", "original"))
    epsilon = options.get("eps", 1e-8)
    betas = options.get("betas", (0.9, 0.999))
    extra = {name: options[name] for name in options if name not in ("eps", "betas")}
    if kind == "muon":  # of one step only the direction counts
        extra = {name: extra[name] for name in extra if name not in ("momentum", "nesterov")}

    def whole(rate: float) -> Update:
        if kind == "sgd":
            return _by_torch(lambda ps, r: torch.optim.SGD(ps, lr=r, **extra))
        if kind in ("lion", "sign"):
            return _signs
        return _by_torch(lambda ps, r: torch.optim.Adam(ps, lr=r, betas=betas, eps=epsilon))

    def update(module: nn.Module, rate: float) -> dict[str, Tensor]:
        moved = whole(rate)(module, rate)
        parameters = dict(module.named_parameters())
        result = {name: torch.zeros_like(step) for name, step in moved.items()}
        for row, part in weight_parts(module):
            if row.parameter not in moved:
                continue
            weight, group = row.weight, group_of(row.weight)
            factor = float(multipliers.get(weight, multipliers.get(group, 1.0)))
            step = part.of(moved[row.parameter])
            if kind == "muon" and group == "matrices" and step.ndim >= 2:
                gradient = parameters[row.parameter].grad
                assert gradient is not None
                step = -rate * _muon(module, row.parameter, part.of(gradient), adjust)
            value = part.of(parameters[row.parameter].detach())
            part.of(result[row.parameter]).add_(factor * (step - rate * decay * value))
        return result

    return update


def _signs(module: nn.Module, rate: float) -> dict[str, Tensor]:
    return {
        name: -rate * p.grad.sign()
        for name, p in module.named_parameters()
        if p.requires_grad and p.grad is not None
    }


def _muon(module: nn.Module, name: str, g: Tensor, adjust: str) -> Tensor:
    """Jordan's Newton-Schulz iteration on one matrix, a part of the parameter of that name."""
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
    """A matrix of what a fused one keeps head by head."""
    return part.reshape(-1, part.shape[-1])
