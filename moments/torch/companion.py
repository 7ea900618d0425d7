"""Beside a training run: every k steps, what is measured against what the weights as they then are
let expect.

At every such step a slice of the batch that the module has just read is run once more, forward and
back, without touching gradients, modes or random state; the module is described anew, predicted on
that slice, and held against it. The predictions are those of independent weights: at step 0 a
departure is a fault, later on it is also what training has done to the weights, and its growth is
what to look at.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import MomentsError, ValidityWarning, domain_error, optional, without_warnings
from ..files import as_frame
from ..formulas.checks import check_count
from ..prediction.predict import predict
from ..show.comparison import Comparison, compare
from .anatomy import anatomy_of
from .architecture import promised_by
from .check import FAR, architecture_read, inputs_for
from .describe import describe
from .diagnose import Text, at_length, case_of
from .measure import measure
from .roles import Role, block_of, tensors_of
from .running import grouped, own_module

with optional("torch", "torch"):
    import torch
    from torch import nn

if TYPE_CHECKING:
    import pandas

LARGE_UPDATE = 0.1
"""Size of one update over that of the weights from which it is an alarm: ten such steps in one
direction double them, which a warm-up is there to prevent."""

DEPARTED = 10.0
"""Factor beyond the band from which a point of the stream is an alarm after step 0: until then it
is told in the frame alone, since training itself moves it out of what independent weights give."""

LARGE_GRADIENT = 100.0
"""Factor between the norms of measured and predicted weight gradients from which it is an alarm:
ten times what one draw does in a deep Post-LN stack."""


class LookRow(NamedTuple):
    """One number of one step.

    Attributes:
        step: of the optimizer, from 0.
        quantity: "variance", "grad_variance", "loss", "gradient_norm" or "update" (its size over
            that of the weights).
        layer: of the point or the matrix; -1 where there is none.
        parameter: a tensor's name, or "".
        measured, expected, low, high: nan where none is known.
        alarm: whether it is out of its band.
    """

    step: int
    quantity: str
    layer: int
    parameter: str
    measured: float
    expected: float = math.nan
    low: float = math.nan
    high: float = math.nan
    alarm: bool = False


class Watch:
    """A training run held against predictions, at step 0 and every so many steps.

    Args:
        module: as of `moments.check`; compiled and data-parallel ones are watched as what they
            hold.
        optimizer: whose steps are counted; its hooks then do everything. None: call
            `watching.step()` after every backward pass.
        batch: what the module is run on to be read; None: random input.
        every: steps between two looks.
        loss: as of `moments.check`.
        writer: a TensorBoard SummaryWriter (anything with `add_scalar`) or a Weights & Biases run
            (anything with `log`); None: rows are kept in the frame alone.
        say: takes one line per alarm; None: a ValidityWarning each.

    Attributes:
        rows: everything seen.
        seconds: spent on looking, over all looks.
        looks: how many there were.

    Also a context manager, which takes its hooks off at the end.

    Raises:
        DomainError: not an nn.Module, or `every` below 1.
        MomentsError: a module that cannot be read.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Any = None,
        *,
        batch: Any = None,
        every: int = 100,
        loss: Callable[[Any, Any], Any] | None = None,
        writer: Any = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        module = own_module(module)
        check_count("every", every)
        if writer is not None and not (hasattr(writer, "add_scalar") or hasattr(writer, "log")):
            allowed = "a SummaryWriter (add_scalar) or a run of Weights & Biases (log)"
            raise domain_error("writer", type(writer).__name__, allowed)
        self.module, self.every, self.loss = module, every, loss
        self.writer, self.say = writer, _warned if say is None else say
        self.rows: list[LookRow] = []
        self.seconds, self.looks, self.steps = 0.0, 0, 0
        self._unwritten, self._words = 0, list[str]()
        self._parts = anatomy_of(module, batch)
        self._found = self._parts.found
        self._read: Any = None
        self._batch: Any = None
        self._before: dict[str, Any] | None = None
        self._expected: dict[str, float] = {}
        self._handles = [module.register_forward_pre_hook(self._keep, with_kwargs=True)]
        self._optimizer = getattr(optimizer, "optimizer", optimizer)  # as accelerate wraps it
        if self._optimizer is not None:
            self._handles.append(self._optimizer.register_step_pre_hook(self._pre))
            self._handles.append(self._optimizer.register_step_post_hook(self._post))

    # --- hooks ------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether this step is looked at."""
        return self.steps % self.every == 0

    def _keep(self, _: nn.Module, positional: Any, named: Mapping[str, Any]) -> None:
        if self.due and self._batch is None and torch.is_grad_enabled():
            self._batch = dict(named) if named else (positional[0] if positional else None)

    def _pre(self, *_: Any) -> None:
        if self.due:
            self._look()
            tensors = tensors_of(self.module)
            self._before = {
                role.parameter: tensors[role.parameter].detach().clone()
                for role in self._found.roles
                if role.is_matrix
            }

    def _post(self, *_: Any) -> None:
        if self._before is not None:
            began = time.perf_counter()
            self._updates(self._before)
            self._before = None
            self.seconds += time.perf_counter() - began
        self._counted()

    def step(self) -> None:
        """Count a step, and look where it is due; for a loop without the optimizer's hooks."""
        if self.due:
            self._look()
        self._counted()

    def _counted(self) -> None:
        self._write()
        self.steps += 1
        self._batch = None

    def remove(self) -> None:
        """Take the hooks off."""
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()

    # --- looking ----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Measure a slice of the batch and predict it."""
        began = time.perf_counter()
        # The module's own forward is run below: what it then reads is no new batch.
        given, self._batch = self._batch, False
        try:
            with torch.enable_grad(), without_warnings():
                self._rows_of(self._compared(given))
        except MomentsError as error:
            # Such as a tensor that is not finite: that is what a companion is there to tell.
            self._add("finite", -1, "", 0.0, 1.0, alarm=True)
            self._words.append(f"step {self.steps}: {str(error).splitlines()[0]}")
        self.looks += 1
        self.seconds += time.perf_counter() - began

    def _compared(self, given: Any) -> Comparison:
        read, example = self._architecture(), self._parts.example
        inputs = inputs_for(self.module, self._found, read, given, self.loss, example)
        measured = measure(self.module, inputs.batch, loss=inputs.loss)
        model = at_length(read, measured)
        described = describe(self.module, batch=inputs.few, architecture=model)
        found = described.model
        if found is None:
            said = "; ".join(described.unplaced)
            raise MomentsError(f"no Transformer says what it does: {said}")
        text = Text.of(self.module, found, inputs.batch, inputs.loss)
        case, _ = case_of(found, text, measured, None)
        return compare(predict(case.model, **case.inputs), measured, same_weights=True)

    def _architecture(self) -> Any:
        if self._read is None:
            promised = promised_by(self.module)
            self._read = architecture_read(self.module, None, self._parts, promised)
        return self._read

    def _rows_of(self, comparison: Comparison) -> None:
        points = comparison.points()
        for row in points[points["stack"] == ""].to_dict("records"):
            numbers = [float(row[key]) for key in ("measured", "predicted", "low", "high")]
            measured, _, low, high = numbers
            alarm = abs(float(row["deviations"])) > FAR
            if self.steps:
                alarm = not low / DEPARTED <= measured <= high * DEPARTED
            self._add(str(row["quantity"]), int(row["layer"]), "", *numbers, alarm=alarm)
        p, m = comparison.prediction, comparison.measurement
        if m.loss is not None:
            expected = math.nan if p.loss is None else float(p.loss)
            self._add("loss", -1, "", float(m.loss), expected)
        labels = grouped(self._found.roles, lambda role: (role.layer, role.full_name))
        self._expected = {}
        for row in comparison.weight_gradients().to_dict("records"):
            measured, expected = (math.sqrt(float(row[k])) for k in ("measured", "predicted"))
            entry = labels.get((int(row["layer"]), f"{row['stack']}{row['weight']}"), [])
            if not entry or not entry[0].is_matrix:
                continue
            far = expected > 0 and not (
                expected / LARGE_GRADIENT <= measured <= expected * LARGE_GRADIENT
            )
            self._add(
                "gradient_norm", int(row["layer"]), entry[0].label, measured, expected, alarm=far
            )
            self._expected[entry[0].label] = expected

    def _updates(self, before: Mapping[str, Any]) -> None:
        """Size of the step over that of the weights, beside what the optimizer's rule makes."""
        tensors = tensors_of(self.module)
        for role in self._found.roles:
            if not role.is_matrix:
                continue
            old = role.part.of(before[role.parameter]).double()
            change = float((block_of(tensors, role).double() - old).norm())
            size = float(old.norm())
            if size == 0:
                continue
            wanted = self._step_size(tensors[role.parameter], role, old.numel())
            of = "update", role.layer, role.label, change / size, wanted / size
            self._add(*of, alarm=change / size > LARGE_UPDATE)

    def _step_size(self, parameter: Any, role: Role, entries: int) -> float:
        """Norm of an update: of Adam's first step the learning rate in every entry, of plain SGD
        the learning rate times the predicted gradient; else nan."""
        for group in self._optimizer.param_groups:
            if not any(p is parameter for p in group["params"]):
                continue
            rate, kind = float(group["lr"]), type(self._optimizer).__name__
            if kind in ("Adam", "AdamW") and self.steps == 0:
                return rate * math.sqrt(entries)
            if kind == "SGD" and not group.get("momentum"):
                return rate * self._expected.get(role.label, math.nan)
        return math.nan

    def _add(self, *fields: Any, alarm: bool = False) -> None:
        row = LookRow(self.steps, *fields)
        self.rows.append(row._replace(alarm=alarm or not math.isfinite(row.measured)))

    def _tell(self, rows: list[LookRow]) -> None:
        """One line per quantity that is out of its band somewhere."""
        lines, self._words = self._words, []
        told = (row for row in rows if row.alarm and row.quantity != "finite")
        for quantity, group in grouped(told, lambda row: row.quantity).items():
            worst = max(group, key=_departure)
            where = f"of {worst.parameter}" if worst.parameter else f"at layer {worst.layer}"
            bound = f", alarming from {LARGE_UPDATE:g}" if quantity == "update" else ""
            more = f" (and {len(group) - 1} more)" if len(group) > 1 else ""
            lines.append(
                f"step {worst.step}: {quantity.replace('_', ' ')} {where}{more} is "
                f"{worst.measured:.3g}, {worst.expected:.3g} expected{bound}"
            )
        for line in lines:
            self.say(line)

    def _write(self) -> None:
        """Rows that are new to the writer's own library, measured and expected."""
        new, self._unwritten = self.rows[self._unwritten :], len(self.rows)
        self._tell(new)
        if self.writer is None or not new:
            return
        values: dict[str, float] = {}
        for row in new:
            place = row.parameter or (f"layer {row.layer}" if row.layer >= 0 else "all")
            for kind in ("measured", "expected"):
                value = float(getattr(row, kind))
                if math.isfinite(value):
                    values[f"moments/{row.quantity}/{place}/{kind}"] = value
        values["moments/alarms"] = float(sum(row.alarm for row in new))
        step = new[0].step
        if hasattr(self.writer, "add_scalar"):
            for tag, value in values.items():
                self.writer.add_scalar(tag, value, step)
        else:
            self.writer.log(values, step=step)

    # --- what was seen ----------------------------------------------------------------------------

    @property
    def alarms(self) -> tuple[LookRow, ...]:
        """Rows out of their band."""
        return tuple(row for row in self.rows if row.alarm)

    def to_frame(self) -> pandas.DataFrame:
        """Every row: step, quantity, layer, parameter, measured, expected, low, high, alarm."""
        return as_frame(self.rows, columns=LookRow._fields)

    def __repr__(self) -> str:
        return (
            f"Watch({type(self.module).__name__}: {self.looks} looks in {self.steps} steps, "
            f"{len(self.alarms)} alarms, {self.seconds:.1f} s)"
        )


watch = Watch


def _warned(line: str) -> None:
    warnings.warn(line, ValidityWarning, stacklevel=3)


def _departure(row: LookRow) -> float:
    """By how much a row is out, in powers of e."""
    if not (row.measured > 0 and row.expected > 0):
        return math.inf if not math.isfinite(row.measured) else row.measured
    return abs(math.log(row.measured / row.expected)) + row.measured


# --- trainers -------------------------------------------------------------------------------------


def trainer_callback(**options: Any) -> Any:
    """A callback of Hugging Face's Trainer that watches its model; its `watching` is the Watch.

    Args:
        options: of `watch`, but for module and optimizer.

    Raises:
        MomentsError: transformers is not installed.
    """
    with optional("hf", "transformers"):
        from transformers import TrainerCallback

    class Companion(TrainerCallback):
        """See `moments.torch.trainer_callback`."""

        watching: Watch | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.watching = watch(given["model"], given["optimizer"], **options)

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if self.watching is not None:
                self.watching.remove()

    return Companion()


def lightning_callback(module: Callable[[Any], nn.Module] | None = None, **options: Any) -> Any:
    """A callback of Lightning that watches a LightningModule's model; `watching` is the Watch.

    Args:
        module: finds the model in the LightningModule; None: itself where it can be read, else
            the part of it that has most parameters.
        options: of `watch`, but for module and optimizer. Without a writer the trainer's own
            logger, whichever it is, gets the numbers.

    Raises:
        MomentsError: Lightning is not installed.
    """
    with optional("companion", "lightning"):
        from lightning.pytorch import Callback

    class Companion(Callback):
        """See `moments.torch.lightning_callback`."""

        watching: Watch | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            found = _largest(pl_module) if module is None else module(pl_module)
            writer = options.get("writer") or _Logger.of(trainer)
            given = {**options, "writer": writer}
            self.watching = watch(found, trainer.optimizers[0], **given)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if self.watching is not None:
                self.watching.remove()

    return Companion()


class _Logger:
    """A Lightning logger under the words of a run."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    @classmethod
    def of(cls, trainer: Any) -> _Logger | None:
        return None if trainer.logger is None else cls(trainer.logger)

    def log(self, values: dict[str, float], step: int) -> None:
        self.logger.log_metrics(values, step=step)


def _largest(module: nn.Module) -> nn.Module:
    """The module itself where it has a forward of its own, else the part with most parameters."""
    libraries = ("torch.", "lightning.", "pytorch_lightning.")
    kinds = (kind for kind in type(module).__mro__ if "forward" in vars(kind))
    if not next(kinds).__module__.startswith(libraries):
        return module
    parts = list(module.children())
    return max(parts, key=lambda part: sum(p.numel() for p in part.parameters()), default=module)
