"""Sweeps: every configuration is what `predict` gives of it alone; files, executors, tables."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moments
from moments.grids import run, together
from moments.grids.store import Row
from moments.prediction.draws import QUANTITIES as STREAM

PRE = moments.Transformer(6, 64, 4, 32, dropout=0.1)
ROUNDING = 1e-12


def alone(model: moments.Transformer, **inputs: Any) -> moments.Prediction:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        return moments.predict(model, **inputs)


def close(found: float, expected: float, tolerance: float) -> bool:
    return bool(np.isclose(found, expected, rtol=tolerance, atol=1e-3 * tolerance))


def assert_as_alone(sweep: moments.Sweep, tolerance: float) -> None:
    """Every configuration against a prediction of its own."""
    for index, values in zip(np.ndindex(sweep.shape), sweep.axes.points(), strict=True):
        model, arguments = sweep.axes.configure(values)
        p = alone(model, **{"theory": sweep.theory, **sweep.inputs, **arguments})
        ends = {"variance": -1, "correlation": -1, "grad_variance": 0, "grad_correlation": 0}
        for name, end in ends.items():
            assert close(sweep[name][index], getattr(p, name)[end], tolerance), (values, name)
            if sweep.stream:
                stream = sweep.stream[name][index]
                assert np.allclose(
                    stream[: model.layers + 1],
                    getattr(p, name),
                    rtol=tolerance,
                    atol=1e-3 * tolerance,
                ), (values, name)
                assert np.all(np.isnan(stream[model.layers + 1 :]))
        if p.loss is not None:
            assert close(sweep["loss"][index], p.loss, tolerance)


# --- the same numbers as alone --------------------------------------------------------------------

MODELS = {
    "pre": PRE,
    "gelu": PRE.replace(activation="gelu", normalization="rmsnorm", norm_epsilon=1e-5),
    "sandwich": PRE.replace(norm="sandwich"),
    "none": PRE.replace(norm="none", branch_scale=0.2),
    "parallel": PRE.replace(parallel=True),
    "qk_norm": PRE.replace(qk_norm="rmsnorm"),
    "lns": PRE.replace(layernorm_scaling=True),
    "post": PRE.replace(norm="post"),
    "swiglu": PRE.replace(activation="swiglu", kv_heads=2),
}


@pytest.mark.parametrize("name", MODELS)
def test_configurations_together_are_those_alone(name: str, monkeypatch: Any) -> None:
    """Numbers of the layers that differ, and depth, where stacks extend."""
    monkeypatch.setattr(run, "SAME", 0.0)  # were any discarded, this would show
    model = MODELS[name]
    depths = [3, 6] if name == "post" else [1, 2, 4, 6]
    grid = run.Axes.of(
        model,
        {"layers": depths, "weights.query": [0.002, 0.02], "branch_scale": [0.1, 0.4]},
    )
    points = [grid.configure(values)[0] for values in grid.points()]
    kinds = [together.kind(point, "refined", {}) for point in points]
    assert None not in kinds
    for shared in set(kinds):
        models = [m for m, k in zip(points, kinds, strict=True) if k == shared]
        given = {"correlation": np.linspace(0.0, 0.7, len(models))}
        found = together.predict_together(models, "refined", given)
        for i, one in enumerate(models):
            p = alone(one, correlation=float(given["correlation"][i]))
            for quantity in STREAM:
                values, expected = getattr(found, quantity), getattr(p, quantity)
                assert np.allclose(values[i, : one.layers + 1], expected, rtol=1e-8, atol=1e-11), (
                    quantity,
                    i,
                )


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("weights.value", [0.005, 0.01, 0.02]),
        ("weights.ffn_out", [0.001, 0.002, 0.004]),
        ("dropout", [0.0, 0.1, 0.3]),
        ("skip_scale", [0.5, 0.9, 1.0]),
        ("temperature", [0.7, 1.0, 2.0]),
        ("norm_gain", [0.7, 1.0, 1.4]),
        ("norm_epsilon", [0.0, 1e-5, 1e-2]),
        ("activation_dropout", [0.0, 0.2, 0.1]),
        ("biases.value", [0.0, 0.01, 0.1]),
        ("biases.query", [0.0, 0.01, 0.1]),
        ("biases.ffn_in", [0.0, 0.01, 0.1]),
    ],
)
def test_any_number_of_a_layer_goes_together(field: str, values: list[float]) -> None:
    model = PRE.replace(activation="gelu", biases=moments.Biases())
    sweep = moments.sweep(model, {field: values, "correlation": [0.0, 0.3]})
    assert_as_alone(sweep, 1e-8)


def test_what_goes_alone_is_exactly_what_predict_gives() -> None:
    model = PRE.replace(norm="post", causal=True, seq_len=8)
    sweep = moments.sweep(model, {"layers": [1, 3], "theory": ["refined"]}, profile=True)
    assert_as_alone(sweep, 0.0)


def test_theories_schemes_and_placements() -> None:
    axes = {"norm": ["pre", "post"], "theory": ["published", "simplified"], "heads": [2, 4]}
    assert_as_alone(moments.sweep(PRE, axes, correlation=0.1), ROUNDING)
    options = {"scheme": ["depth-scaled", None], "layers": [2, 4, 6], "dropout": [0.0, 0.1]}
    known = {s.name for s in moments.schemes()}
    options["scheme"] = [sorted(known - {"dslm"})[0], None]
    assert_as_alone(moments.sweep(PRE, options), 1e-8)


def test_head_and_embedding_with_depth() -> None:
    model = PRE.replace(
        embedding=moments.Embedding(100, 0.02, norm=True),
        head=moments.Head(loss="masked", tied=False, weight_variance=0.01),
    )
    sweep = moments.sweep(model, {"layers": [1, 2, 3, 5, 6]}, profile=True)
    assert_as_alone(sweep, 1e-8)
    assert np.all(sweep["loss"] > np.log(50))
    assert_as_alone(moments.sweep(model, {"head.output_scale": [0.5, 2.0]}), ROUNDING)
    assert_as_alone(moments.sweep(model, {"embedding.token_variance": [0.5, 2.0]}), ROUNDING)


def test_a_thousand_go_through_the_engine_in_few_passes(monkeypatch: Any) -> None:
    counted = []
    whole = together.Stack.forward
    monkeypatch.setattr(together.Stack, "forward", lambda s: (counted.append(s), whole(s))[1])
    moments.sweep(
        PRE.replace(layers=2),
        {"weights.query": np.geomspace(1e-3, 1e-2, 16), "correlation": np.linspace(0, 0.6, 32)},
    )
    assert len(counted) <= 6  # two pieces of 256, and two of each alone


def test_a_function_makes_the_model() -> None:
    def made(width: int, layers: int) -> moments.Transformer:
        return moments.Transformer(layers, width, width // 32, 16)

    sweep = moments.sweep(made, {"width": [32, 64], "layers": [1, 2], "dropout": [0.0, 0.2]})
    assert_as_alone(sweep, ROUNDING)
    assert sweep.model(width=64, layers=2).heads == 2


# --- refusals and warnings ------------------------------------------------------------------------


def test_what_is_refused_or_doubtful_is_kept_with_its_reason() -> None:
    with pytest.warns(moments.ValidityWarning, match="2 of 4 configurations were refused"):
        sweep = moments.sweep(PRE, {"heads": [4, 5], "dropout": [0.0, 0.1]})
    frame = sweep.to_frame()
    assert list(frame["heads"]) == [4, 4, 5, 5]
    assert not frame["refused"][:2].any()
    assert frame["refused"][2:].str.contains("heads").all()
    assert np.isnan(sweep["variance"][1]).all()
    assert np.isfinite(sweep["variance"][0]).all()
    assert "2 refused" in repr(sweep)

    values = np.geomspace(1e-3, 0.4, 7)
    with pytest.warns(moments.ValidityWarning, match="left a formula's validity"):
        sweep = moments.sweep(PRE.replace(layers=1), {"weights.query": values})
    noted = [i for i, v in enumerate(values) if alone(sweep.model(**{"weights.query": v})).warnings]
    assert sorted(sweep.warnings) == noted
    assert 0 < len(noted) < len(values)
    assert_as_alone(sweep, 1e-8)


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({}, "axes"),
        ({"layer": [1]}, "did you mean 'layers'"),
        ({"weights": [1.0]}, "weights.query"),
        ({"weights.querry": [1.0]}, "did you mean 'weights.query'"),
        ({"head.output_scale": [1.0]}, "the model has no head"),
        ({"layers.deep": [1]}, "no declaration"),
        ({"layers": 3}, "a list of values"),
        ({"layers": "12"}, "a list of values"),
        ({"layers": []}, "one value at least"),
        ({"layers": [1, 1]}, "there once"),
        ({"dropout": [float("nan")]}, "finite"),
        ({"dropout": [[0.1]]}, "a number"),
        ({"scheme.k": [1.0]}, "next to an axis"),
        ({"scheme": ["deepnorm"], "norm": ["pre"]}, "that scheme 'deepnorm' sets"),
        ({"scheme": ["deepnorn"]}, "deepnorm"),
        ({"dropout": [1.2, 1.4]}, "every configuration is refused"),
        ({"layers": list(range(1, 10**4)), "variance": np.linspace(1, 2, 10**4)}, "at most"),
    ],
)
def test_bad_axes(axes: dict[str, Any], words: str) -> None:
    with pytest.raises(moments.DomainError, match=words):
        moments.sweep(PRE, axes)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"theory": "refind"}, "theory"),
        ({"varience": 1.0}, "did you mean 'variance'"),
        ({"layers": 3}, "argument"),
        ({"executor": 4}, "executor"),
        ({"path": "/no/such/folder/a.jsonl"}, "cannot write"),
        ({"variance": [1.0, 2.0]}, "one configuration"),
    ],
)
def test_bad_arguments(given: dict[str, Any], words: str) -> None:
    with pytest.raises(moments.DomainError, match=words):
        moments.sweep(PRE, {"layers": [1, 2]}, **given)
    with pytest.raises(moments.DomainError, match="an axis or an argument"):
        moments.sweep(PRE, {"variance": [1.0, 2.0]}, variance=1.0)
    with pytest.raises(moments.DomainError, match="a function that makes one"):
        moments.sweep(3, {"layers": [1]})  # type: ignore[arg-type]


# --- files ----------------------------------------------------------------------------------------

AXES = {"layers": [1, 2, 3], "weights.query": [0.001, 0.01]}


def test_a_cut_file_is_gone_on_with(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "sweep.jsonl"
    whole = moments.sweep(PRE, AXES, path=path, profile=True)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 6
    path.write_bytes(b"".join(lines[:4]) + lines[4][:17])  # killed while it wrote
    assert np.isfinite(moments.Sweep.load(path)["variance"]).sum() == 3
    assert "3 not there yet" in repr(moments.Sweep.load(path))
    computed = []
    original = run._Work.rows
    monkeypatch.setattr(
        run._Work, "rows", lambda self, piece: (computed.extend(piece), original(self, piece))[1]
    )
    again = moments.sweep(PRE, AXES, path=path, profile=True)
    assert len(computed) == 3
    assert moments.Sweep.load(path).to_frame().equals(again.to_frame())
    for name in STREAM:
        # What went together then may go alone now.
        assert np.allclose(again.stream[name], whole.stream[name], rtol=1e-8, equal_nan=True)
    assert moments.sweep(PRE, AXES, path=path, profile=True).to_frame().equals(again.to_frame())
    assert len(computed) == 3
    assert path.read_bytes().count(b"\n") == 7


def test_another_sweep_in_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    moments.sweep(PRE, AXES, path=path, variance=2.0)
    kept = path.read_bytes()
    for model, axes, given, words in (
        (
            PRE.replace(dropout=0.2),
            AXES,
            {"variance": 2.0},
            r"model.dropout is 0\.1 there and 0\.2",
        ),
        (PRE, {**AXES, "layers": [1, 2]}, {"variance": 2.0}, r"axes.layers is \[1, 2, 3\] there"),
        (PRE, AXES, {"variance": 1.0}, "inputs.variance is 2.0 there and 1.0 here"),
        (PRE, AXES, {"variance": 2.0, "theory": "published"}, "theory is 'refined' there"),
        (PRE, AXES, {"variance": 2.0, "profile": True}, "profile is False there"),
    ):
        with pytest.raises(moments.DomainError, match=f"another sweep: {words}"):
            moments.sweep(model, axes, path=path, **given)  # type: ignore[arg-type]
    assert path.read_bytes() == kept


@pytest.mark.parametrize("version", ["0.0.9", None])
def test_a_file_of_another_version_is_not_gone_on_with(tmp_path: Path, version: str | None) -> None:
    path = tmp_path / "sweep.jsonl"
    moments.sweep(PRE, AXES, path=path)
    first, *rest = path.read_text().splitlines()
    header = json.loads(first)
    assert header.pop("version") == moments.__version__
    header |= {} if version is None else {"version": version}
    for there in (rest, rest[:2]):  # whole, and cut short
        path.write_text("\n".join([json.dumps(header), *there, ""]))
        kept = path.read_bytes()
        said = "a version that kept no number" if version is None else r"moments '0\.0\.9'"
        with pytest.raises(moments.DomainError, match=f"predictions of {said}.*name a new file"):
            moments.sweep(PRE, AXES, path=path)
        assert path.read_bytes() == kept
        with pytest.warns(moments.ValidityWarning, match=f"predictions of {said}"):
            held = moments.Sweep.load(path)
        assert held.done.sum() == len(there)


@pytest.mark.parametrize("text", ["hello", "[1, 2]\n", '{"format": "other"}\n', "{}\n"])
def test_other_files_are_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(moments.DomainError, match="path"):
        moments.sweep(PRE, AXES, path=path)
    assert path.read_text() == text


@pytest.mark.parametrize("kind", ["/dev/full", "/dev/zero", "pipe", "folder"])
def test_what_is_no_regular_file_is_refused_unread(tmp_path: Path, kind: str) -> None:
    path = Path(kind) if kind.startswith("/") else tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(moments.DomainError, match="no regular file"):
        moments.sweep(PRE, AXES, path=path)
    with pytest.raises(moments.DomainError, match="no regular file"):
        moments.Sweep.load(path)


def test_a_line_without_end_is_not_read_whole(tmp_path: Path, monkeypatch: Any) -> None:
    """A file of zeros has one line of its whole size."""
    monkeypatch.setattr("moments.grids.store.LONGEST", 10_000)
    path = tmp_path / "zeros"
    path.write_bytes(bytes(10**5))
    with pytest.raises(moments.DomainError, match="holds something else"):
        moments.Sweep.load(path)
    moments.sweep(PRE, {"layers": [1]}, path=tmp_path / "sweep.jsonl")
    with open(tmp_path / "sweep.jsonl", "ab") as file:
        file.write(bytes(10**5))
    with pytest.raises(moments.DomainError, match="line 3 of"):
        moments.Sweep.load(tmp_path / "sweep.jsonl")


DAMAGED = {
    "deep": "[" * 10**5,
    "deep inside": '{"index": 0, "values": ' + "[" * 60 + "]" * 60 + "}",
    "400 digits": '{"index": 0, "values": {"variance": 1' + "0" * 400 + "}}",
    "5000 digits": '{"index": 1' + "0" * 5000 + ', "values": {}}',
    "a large index": '{"index": 6, "values": {}}',
    "a negative index": '{"index": -1, "values": {}}',
    "no number": '{"index": 0, "values": {"variance": NaN}}',
    "a reason": '{"index": 0, "refused": 5}',
    "notes": '{"index": 0, "values": {}, "warnings": 3}',
    "stream": '{"index": 0, "values": {}, "stream": [[1.0], [2.0, 3.0], [1.0], [1.0]]}',
    "a flag": '{"index": true, "values": {}}',
    "nothing": "{}",
    "zeros": "\0\0\0",
    "a quantity": '{"index": 0, "values": {"joy": 1.0}}',
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_line_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "sweep.jsonl"
    moments.sweep(PRE, AXES, path=path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], DAMAGED[name], *lines[3:], ""]))
    kept = path.read_bytes()
    for again in (lambda: moments.Sweep.load(path), lambda: moments.sweep(PRE, AXES, path=path)):
        with pytest.raises(moments.DomainError, match=r"line 4 of .*sweep\.jsonl"):
            again()
    assert path.read_bytes() == kept


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", None),
        ("model", {"format": 1}),
        ("model", {"format": 1, "layers": 10**400}),
        ("axes", [1]),
        ("axes", {"layers": 3}),
        ("axes", {"layerz": [1, 2, 3, 4, 5, 6]}),
        ("theory", "none"),
        ("inputs", 3),
        ("profile", "yes"),
    ],
)
def test_a_damaged_first_line_is_named(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "sweep.jsonl"
    moments.sweep(PRE, AXES, path=path)
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(first) | {field: value}), *rest, ""]))
    with pytest.raises(moments.DomainError, match="line 1 of"):
        moments.Sweep.load(path)
    with pytest.raises(moments.DomainError, match="path"):
        moments.sweep(PRE, AXES, path=path)


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """A file system's limit on the size of a file stands for a disk that is full."""
    path = tmp_path / "sweep.jsonl"
    code = (
        "import resource, signal, moments\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2500, 2500))\n"
        "model = moments.Transformer(1, 32, 2, 8, causal=True)\n"
        "try:\n"
        f"    moments.sweep(model, {{'seq_len': range(4, 24)}}, path={str(path)!r})\n"
        "except moments.DomainError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot write" in done.stdout
    assert "the same call goes on" in done.stdout
    assert path.stat().st_size == 2500
    model = moments.Transformer(1, 32, 2, 8, causal=True)
    there = int(moments.Sweep.load(path).done.sum())
    assert 0 < there < 20
    assert moments.sweep(model, {"seq_len": range(4, 24)}, path=path).done.all()
    assert path.read_bytes().count(b"\n") == 21


def test_killed_and_gone_on_with(tmp_path: Path) -> None:
    """By a signal that leaves no time to tidy up, in the middle of a long sweep."""
    path = tmp_path / "sweep.jsonl"
    code = (
        "import moments\n"
        "model = moments.Transformer(1, 64, 4, 32, causal=True)\n"
        f"s = moments.sweep(model, {{'seq_len': range(40, 47)}}, path={str(path)!r})\n"
        "print(s.to_frame().to_json())"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL) as process:
        while not path.exists() or path.read_bytes().count(b"\n") < 4:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    before = moments.Sweep.load(path)
    there = before.to_frame()
    assert 3 <= len(there) < 7
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert path.read_bytes().count(b"\n") == 8
    after = moments.Sweep.load(path).to_frame()
    assert json.loads(done.stdout) == json.loads(after.to_json())
    assert after[: len(there)].equals(there)
    assert list(after["seq_len"]) == list(range(40, 47))


# --- executors ------------------------------------------------------------------------------------


def test_processes_and_threads_give_the_same() -> None:
    expected = moments.sweep(PRE, AXES).to_frame()
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as processes:
        found = moments.sweep(PRE, AXES, executor=processes).to_frame()
        assert (
            found.drop(columns="warnings")
            .round(8)
            .equals(expected.drop(columns="warnings").round(8))
        )
        with pytest.raises(moments.MomentsError, match="top of a module"):
            moments.sweep(lambda layers: PRE, {"layers": [1]}, executor=processes)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        assert moments.sweep(PRE, AXES, executor=threads).shape == (3, 2)


def test_an_executor_that_breaks_down_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    moments.sweep(PRE, AXES, path=path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as processes:
        processes.submit(os._exit, 1)
        with pytest.raises(moments.MomentsError, match="the same call goes on from there"):
            moments.sweep(PRE, AXES, path=path, executor=processes)
    assert path.read_bytes() == b"".join(lines[:3])


def test_dask() -> None:
    distributed = pytest.importorskip("distributed")
    with (
        warnings.catch_warnings(),
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        warnings.simplefilter("ignore", DeprecationWarning)
        found = moments.sweep(PRE, AXES, executor=client.get_executor())
    assert_as_alone(found, 1e-8)


# --- tables ---------------------------------------------------------------------------------------


def test_tables_and_labels() -> None:
    sweep = moments.sweep(PRE, {"correlation": [0.0, 0.5], "layers": [1, 3]}, profile=True)
    frame = sweep.to_frame()
    assert list(frame["input_correlation"]) == [0.0, 0.0, 0.5, 0.5]
    assert list(frame["layers"]) == [1, 3, 1, 3]
    assert frame["correlation"][2] == sweep["correlation"][1, 0]
    rows = sweep.to_frame(by_layer=True)
    assert list(rows["layer"]) == [0, 1, 0, 1, 2, 3] * 2
    assert np.isfinite(rows.to_numpy(dtype=float)).all()
    assert close(rows["correlation"][6], 0.5, ROUNDING)
    with pytest.raises(moments.DomainError, match="profile=True"):
        moments.sweep(PRE, {"layers": [1]}).to_frame(by_layer=True)
    p = sweep.prediction(layers=3, correlation=0.5)
    assert close(p.variance[-1], sweep["variance"][1, 1], 1e-8)
    for text in (repr(sweep), str(sweep), sweep._repr_html_()):
        assert "input_correlation 0, 0.5 x layers 1, 3" in text
    with pytest.raises(moments.DomainError, match="quantity"):
        sweep["varience"]
    with pytest.raises(moments.DomainError, match="axis"):
        sweep.model(layer=3)


def test_labelled_arrays() -> None:
    pytest.importorskip("xarray")
    sweep = moments.sweep(PRE, {"layers": [1, 3], "weights.query": [0.001, 0.01]}, profile=True)
    data = sweep.to_xarray()
    assert data["variance"].dims == ("layers", "weights.query")
    one = data.sel({"layers": 3, "weights.query": 0.01})
    assert float(one["variance"]) == sweep["variance"][1, 1]
    assert data["stream_variance"].shape == (2, 2, 4)
    assert float(one["stream_variance"][0]) == 1.0


def test_pictures() -> None:
    sweep = moments.sweep(
        PRE,
        {"layers": [1, 2, 4], "weights.query": [0.001, 0.005, 0.01], "dropout": [0.0, 0.2]},
        theory="published",
    )
    figure = sweep.plot(x="weights.query", y="layers", quantity="grad_variance", name="tiny")
    panels = [ax for ax in figure.axes if ax.get_title("left")]
    assert [ax.get_title("left") for ax in panels] == ["dropout 0", "dropout 0.2"]
    assert figure.get_suptitle().startswith("tiny: d_model 64")
    mesh = panels[1].collections[0].get_array()
    assert np.array_equal(np.ravel(mesh), sweep["grad_variance"][:, :, 1].ravel())
    lines = moments.sweep(PRE, {"layers": [1, 2, 4], "dropout": [0.0, 0.2]}).plot()
    assert len(lines.axes[0].lines) == 2
    with pytest.raises(moments.DomainError, match="axes more than"):
        moments.sweep(
            PRE.replace(layers=1),
            {"dropout": [0.0, 0.2], "variance": [1.0, 2.0], "heads": [2, 4], "seq_len": [4, 8]},
        ).plot()
    with pytest.raises(moments.DomainError, match="another axis"):
        sweep.plot(x="layers", y="layers")
    assert lines.axes[0].get_xlabel() == "layers"


def test_counts_have_whole_ticks() -> None:
    found = moments.sweep(PRE, {"layers": [2, 3, 5], "weights.query": [0.001, 0.01, 0.02]})
    ax = found.plot(x="layers", y="weights.query").axes[0]
    assert all(tick == round(tick) for tick in ax.get_xticks())


@pytest.mark.parametrize("stream", ["[]", "[[1],[1],[1]]", "[[1],[1],[1],[1,2]]"])
def test_a_row_without_four_profiles_is_damage(stream: str) -> None:
    with pytest.raises(ValueError, match="four profiles"):
        Row.of_line(f'{{"index":0,"values":{{}},"stream":{stream}}}'.encode())
