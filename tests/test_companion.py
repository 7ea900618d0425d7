"""A training run beside its predictions: by hand, under two trainers, into writers."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moments

torch = pytest.importorskip("torch")

import nano_gpt  # noqa: E402
from small_modules import family_module  # noqa: E402

CONFIG = nano_gpt.Config(n_layer=2, dropout=0.0, n_embd=48, block_size=10)


def module() -> Any:
    torch.manual_seed(0)
    return nano_gpt.GPT(CONFIG)


class Written:
    """What a SummaryWriter is told."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.values[tag, step] = value


def trained(net: Any, steps: int, rate: float = 1e-4, kind: Any = None, **options: Any) -> Any:
    optimizer = (kind or torch.optim.AdamW)(net.parameters(), lr=rate)
    watching = moments.torch.watch(net, optimizer, **options)
    batch = nano_gpt.text(CONFIG)
    for _ in range(steps):
        net(**batch)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return watching


# --- a loop by hand -------------------------------------------------------------------------------


def test_every_k_steps_each_number_beside_its_expectation() -> None:
    writer = Written()
    watching = trained(module(), 4, every=3, writer=writer)
    frame = watching.to_frame()
    assert sorted(frame["step"].unique()) == [0, 3]
    assert set(frame["quantity"]) == {
        "variance",
        "grad_variance",
        "loss",
        "gradient_norm",
        "update",
    }
    assert watching.looks == 2
    assert watching.alarms == ()
    first = frame[frame["step"] == 0]
    points = first[first["quantity"] == "variance"]
    np.testing.assert_allclose(points["measured"], points["expected"], rtol=0.2)
    norms = first[first["quantity"] == "gradient_norm"]
    assert len(norms) == 6 * CONFIG.n_layer
    assert np.median(np.abs(np.log(norms["measured"] / norms["expected"]))) < 0.25
    written = writer.values["moments/variance/layer 2/measured", 3]
    row = frame[(frame["step"] == 3) & (frame["quantity"] == "variance") & (frame["layer"] == 2)]
    assert written == row["measured"].item()


def test_the_first_step_of_adam_moves_every_entry_by_the_learning_rate() -> None:
    frame = trained(module(), 1, rate=1e-5).to_frame()
    updates = frame[frame["quantity"] == "update"]
    linear = updates[updates["parameter"].str.contains("c_proj|c_fc")]
    # Adam's epsilon and decay are all that keeps |g| / (|g| + 1e-8) from 1.
    np.testing.assert_allclose(linear["measured"], linear["expected"], rtol=0.02)


def test_a_step_of_sgd_is_predicted_from_the_gradient() -> None:
    frame = trained(module(), 1, rate=0.1, kind=torch.optim.SGD).to_frame()
    updates = frame[(frame["quantity"] == "update") & frame["parameter"].str.contains("c_fc")]
    # The slice that is looked at is half of the batch: its gradient is not quite the step's.
    ratio = updates["measured"] / updates["expected"]
    assert np.all(np.abs(np.log(ratio)) < math.log(2))


def test_the_run_itself_is_not_touched() -> None:
    one, other = module(), module()
    one.config.dropout = other.config.dropout = 0.0
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
    batch = nano_gpt.text(CONFIG)
    torch.manual_seed(5)
    watching = trained(one, 2, rate=1e-3, say=lambda line: None)
    torch.manual_seed(5)
    for _ in range(2):
        other(**batch)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert one.training == other.training
    watching.remove()
    assert not one._forward_pre_hooks


def test_updates_that_are_too_large_are_an_alarm() -> None:
    with pytest.warns(moments.ValidityWarning, match=r"step 0: update of .* alarming from 0\.1"):
        watching = trained(module(), 1, rate=1e-2)
    assert {row.quantity for row in watching.alarms} == {"update"}


def test_tensors_that_are_not_finite_are_told() -> None:
    net = module()
    with torch.no_grad():
        net.transformer["h"][1].mlp.c_fc.weight[0, 0] = math.nan
    lines: list[str] = []
    watching = moments.torch.watch(net, say=lines.append)
    net(**nano_gpt.text(CONFIG))
    watching.step()
    assert [row.quantity for row in watching.alarms] == ["finite"]
    assert "weights.ffn_in" in lines[0]
    assert "nan" in lines[0]


def test_without_an_optimizer_steps_are_counted_by_hand() -> None:
    net = module()
    with moments.torch.watch(net, every=2) as watching:
        for _ in range(2):
            net(**nano_gpt.text(CONFIG))[1].backward()
            watching.step()
    assert (watching.steps, watching.looks) == (2, 1)
    assert "update" not in set(watching.to_frame()["quantity"])


def test_what_cannot_be_watched_says_why() -> None:
    with pytest.raises(moments.DomainError, match="every = 0"):
        moments.torch.watch(module(), every=0)
    with pytest.raises(moments.DomainError, match="SummaryWriter"):
        moments.torch.watch(module(), writer=print)
    with pytest.raises(moments.MomentsError, match="no attention beside a residual stream"):
        moments.torch.watch(torch.nn.Linear(2, 2))


# --- trainers -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # of the trainer's own machinery
def test_hugging_faces_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    net = family_module("gpt2", 2, 48)
    ids = torch.randint(101, (8, 16), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    companion = moments.torch.trainer_callback(every=2, say=lambda line: None)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    transformers.Trainer(net, arguments, train_dataset=rows, callbacks=[companion]).train()
    frame = companion.watching.to_frame()
    assert sorted(frame["step"].unique()) == [0, 2]
    assert {"variance", "gradient_norm", "update"} <= set(frame["quantity"])
    assert companion.watching.steps == 3


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Wrapped(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = module()

        def training_step(self, batch: Any, number: int) -> Any:
            return self.net(idx=batch[:, :-1], targets=batch[:, 1:])[1]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    ids = torch.randint(97, (8, 11), generator=torch.Generator().manual_seed(0))
    companion = moments.torch.lightning_callback(every=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_steps=3,
            callbacks=[companion],
            logger=False,
            accelerator="cpu",
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(Wrapped(), torch.utils.data.DataLoader(ids, batch_size=4))
    frame = companion.watching.to_frame()
    assert sorted(frame["step"].unique()) == [0, 2]
    assert companion.watching.alarms == ()


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        watching = trained(module(), 1, writer=writer)
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator(str(tmp_path))
    accumulator.Reload()
    (event,) = accumulator.Scalars("moments/variance/layer 1/measured")
    frame = watching.to_frame()
    row = frame[(frame["quantity"] == "variance") & (frame["layer"] == 1)]
    assert event.value == pytest.approx(row["measured"].item(), rel=1e-6)
