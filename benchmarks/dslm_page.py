"""The page docs/dslm-on-modules.md from what benchmarks/dslm_on_modules.py stored."""

from __future__ import annotations

from typing import Any

import numpy as np

Run = dict[str, Any]

HEAD = """# DeepScaleLM on real modules

Every module is of its family at d_model 128 with 4 heads, 2000 tokens of vocabulary and 64 tokens
of English text (pictures of natural spectrum for ViT). The scheme is solved for its own
declaration, `moments.solve(moments.from_huggingface(config), "dslm", token_ids=...)`, written into
it by `moments.torch.initialize`, audited, and the module runs forward and backward with its own
training loss, in training mode. `moments.predict(plan.model)` on the same tokens is what it is held
against; nothing is fitted. Torch's own modules read rows of a table of variance 1 for the same
text, and their output receives a white gradient; decoders read an encoder of the same depth.

Columns: the variance that enters layer 1; the largest distance to 1 of the stream's variance after
layers 1 to N, predicted, and measured as the mean over draws of the weights with its standard
error at that layer; the measured variance averaged over all these layers, with its standard error;
the predicted gradient variance at layer 1 over that at layer N; the mean over layers of
|log(measured / predicted)| of gradient variance; and the share of layers and draws whose gradient
variance lies inside the predicted 95 % band of one draw.

"""

RELEASED = "released constants"
"""Ends the name of a case that has the authors' constants and not the solved blocks."""

_CONSTANTS = """## The constants as released

`variant="released"`, the default where the paper derives its constants (ReLU, LayerNorm, tokens
that all attend to all), neglects the share that a token's own row keeps in an average over L
tokens. Where tokens hardly correlate, as 64 words without positions do, that share is not small:
`moments.solve` then warns and names the remedy, `variant="solved"`, which the tables above have.

"""

NOTES = """
## What the numbers say

* **Forward.** The predicted variance is 1 after every layer{missed}. The measured one is a mean
  over few draws, each of which strays by some 10 % at this width, and the column is the worst of N
  layers. {forward}
* **Width.** Finite widths enter the plan to first order. At 96 layers of GPT-2 the variance
  averaged over layers is {widths}.
* **Entering variance.** Families that normalise the embedding and drop behind it (BERT and its
  relatives) enter layer 1 with 1/(1 - p). Their first norm takes it away.
* **Gradient.** {band}
{failed}"""

FORWARD = 0.05
"""How far from 1 the stream's variance may be."""

FAILED = 0.5
"""Mean error of the logarithm beyond which a gradient is not predicted at all."""


def scores(run: Run) -> dict[str, Any]:
    """What is asked of a case: variances after layers 1 to N, gradients inside the band."""
    variance, gradient = run["variance"], run["grad_variance"]
    predicted, draws = np.array(variance["predicted"][1:]), np.array(variance["measured"])
    measured, error = draws.mean(0)[1:], error_of_mean(draws)[1:]
    far = np.abs(measured - 1)
    worst = int(far.argmax())
    over_layers = draws[:, 1:].mean(1)
    samples, expected = np.array(gradient["measured"]), np.array(gradient["predicted"])
    found: dict[str, Any] = {
        "entering": float(draws[:, 0].mean()),
        "predicted_off": float(np.abs(predicted - 1).max()),
        "measured_mean": float(over_layers.mean()),
        "mean_stderr": float(error_of_mean(over_layers)),
        "measured_off": float(far[worst]),
        "stderr": float(error[worst]),
        "ratio": float(expected[0] / expected[-1]),
        "gradient_error": float(np.abs(np.log(samples.mean(0) / expected)).mean()),
        "inside": None,
    }
    if not isinstance(gradient["band"], str):
        low, high = np.array(gradient["band"])
        found["inside"] = float(((samples >= low) & (samples <= high)).mean())
    return found


def error_of_mean(draws: Any) -> Any:
    """Standard error of a mean over the first axis."""
    return np.std(draws, axis=0, ddof=1) / np.sqrt(len(draws))


def page(data: dict[str, Any]) -> str:
    """The whole page as Markdown."""
    found, constants = _split(data["modules"])
    parts = [HEAD, *_modules(found), _CONSTANTS, *_rows(constants), "\n"]
    parts += [*_paper(data["paper"]), *_depth(data["depth"])]
    runs = {**found, **data["paper"]}
    parts.append(
        NOTES.format(
            forward=_forward(runs),
            missed=_missed(runs),
            widths=_widths(data["paper"]),
            failed=_failed(runs),
            band=_inside(runs),
        )
    )
    parts += _refused(data["modules"])
    return "".join(parts) + f"\nMeasured on {data.get('machine', 'an unknown machine')}.\n"


def _split(runs: dict[str, Run]) -> tuple[dict[str, Run], dict[str, Run]]:
    """Solved cases, and those with the released constants."""
    constants = {key: run for key, run in runs.items() if RELEASED in key}
    return {key: run for key, run in runs.items() if key not in constants}, constants


_COLUMNS = (
    "draws", "audit", "enters", "off 1, predicted", "off 1, measured", "mean over layers",
    "gradient, first / last", "gradient error", "in band",
)  # fmt: skip


def _row(name: str, run: Run) -> str:
    found = scores(run)
    audit = f"{'passed' if run['audit']['passed'] else 'FAILED'}, {run['audit']['checks']}"
    inside = "no band" if found["inside"] is None else f"{found['inside']:.2f}"
    cells = (
        run["seeds"],
        audit,
        f"{found['entering']:.3f}",
        f"{found['predicted_off']:.3f}",
        f"{found['measured_off']:.3f} ({found['stderr']:.3f})",
        f"{found['measured_mean']:.3f} ({found['mean_stderr']:.3f})",
        f"{found['ratio']:.3g}",
        f"{found['gradient_error']:.3f}",
        inside,
    )
    return f"| {name} | " + " | ".join(map(str, cells)) + " |\n"


def _header(first: str) -> str:
    return f"| {first} | " + " | ".join(_COLUMNS) + " |\n|" + " --- |" * (1 + len(_COLUMNS)) + "\n"


def _modules(runs: dict[str, Run]) -> list[str]:
    found = []
    for layers in sorted({int(key.split("/")[1]) for key in runs}):
        own = {key: run for key, run in runs.items() if int(key.split("/")[1]) == layers}
        found += [f"## N = {layers}\n\n", *_rows(own, with_depth=False), "\n"]
    return found


def _rows(runs: dict[str, Run], with_depth: bool = True) -> list[str]:
    """A table of the cases that were not refused, in the order of their names."""
    order = sorted(key for key, run in runs.items() if "refused" not in run)
    return [_header("module"), *(_row(_worded(key, with_depth), runs[key]) for key in order)]


def _paper(runs: dict[str, Run]) -> list[str]:
    found = ["## The paper's own settings\n\n", _header("setting")]
    for key, run in runs.items():
        found.append(_row(key, run) if "refused" not in run else f"| {key} | {run['refused']} |\n")
    encoders = []
    for key, run in runs.items():
        if "encoder_variance" in run:
            stack = run["encoder_variance"]
            draws = np.array(stack["measured"])
            first, last = draws.mean(0)[[0, -1]]
            encoders.append(
                f"In `{key}` the encoder receives variance {first:.2f} and leaves its last layer "
                f"at {last:.3f} ({error_of_mean(draws)[-1]:.3f}), predicted "
                f"{stack['predicted'][-1]:.3f}.\n"
            )
    return [*found, "\n", *encoders, "\n"]


def _depth(rows: dict[str, Any]) -> list[str]:
    """192 and 1000 layers: predictions side by side, then the torch twin."""
    correlations = sorted({key.split("/")[3] for key in rows if "simulated" not in key}, key=float)
    found = [
        "## 192 and 1000 layers\n\n",
        "Predicted at d_model 64, 32 tokens of correlation .25 and dropout .1: the largest "
        "distance of the stream's variance to 1, and gradient variance at layer 1 over that at "
        "layer N for gradients of several correlations.\n\n",
        "| model | layers | off 1 |"
        + "".join(f" gradient correlation {r} |" for r in correlations),
        "\n|" + " --- |" * (3 + len(correlations)) + "\n",
    ]
    heads = dict.fromkeys(key.rpartition("/")[0] for key in rows if "simulated" not in key)
    for head in heads:
        norm, layers, scheme = head.split("/")
        cells = [rows[f"{head}/{r}"] for r in correlations]
        name = f"{'DSLM' if scheme == 'dslm' else 'Xavier'}, {norm.capitalize()}-LN"
        found.append(
            f"| {name} | {layers} | {cells[0]['most']:.3g} |"
            + "".join(f" {cell['ratio']:.4g} |" for cell in cells)
            + "\n"
        )
    found += [
        "\nThe torch twin of the Pre-LN model at 192 layers, 16 tokens, 4 sequences:\n\n",
        "| model | gradient correlation | draws | variance after the last layer, predicted | "
        "measured | gradient, first / last, predicted | measured | in band |\n|" + " --- |" * 8,
        "\n",
    ]
    for key, run in rows.items():
        if not key.startswith("simulated"):
            continue
        _, scheme, r = key.split("/")
        v, g = run["variance"], run["ratio"]
        found.append(
            f"| {'DSLM' if scheme == 'dslm' else 'Xavier'} | {r} | {run['seeds']} | "
            f"{v['predicted'][-1]:.4g} | {v['measured'][-1]:.4g} ({v['stderr'][-1]:.2g}) | "
            f"{g[0]:.4g} | {g[1]:.4g} ({g[2]:.2g}) | {run['inside']:.2f} |\n"
        )
    return found


def _forward(runs: dict[str, Run]) -> str:
    """Which cases are beyond 5 % by more than twice their standard error."""
    cases = {key: scores(run) for key, run in runs.items() if "refused" not in run}
    clear = [
        f"{_worded(key)} ({s['measured_off']:.3f}, error {s['stderr']:.3f})"
        for key, s in cases.items()
        if s["measured_off"] - 2 * s["stderr"] > FORWARD
    ]
    close = sum(s["measured_off"] <= FORWARD for s in cases.values())
    means = [s for s in cases.values() if abs(s["measured_mean"] - 1) <= FORWARD]
    text = (
        f"Of {len(cases)} cases,\n  those of the paper's settings among them, {close} are within "
        f"5 % at their worst layer and {len(means)} on\n  average over layers; beyond 5 % at some "
        "layer by more than twice its standard error "
    )
    return text + (f"are {', '.join(clear)}." if clear else "is none.")


def _widths(runs: dict[str, Run]) -> str:
    """One deep model at two widths."""
    found = {key.split(", ")[2]: scores(run) for key, run in runs.items() if "GPT-2" in key}
    return ", ".join(
        f"{s['measured_mean']:.3f} ({s['mean_stderr']:.3f}) at {width}"
        for width, s in found.items()
    )


def _missed(runs: dict[str, Run]) -> str:
    """Cases where the scheme misses its own condition already in prediction."""
    far = [
        key
        for key, run in runs.items()
        if "refused" not in run and scores(run)["predicted_off"] > FORWARD
    ]
    return f", but not so for {', '.join(map(_worded, far))}" if far else ""


def _inside(runs: dict[str, Run]) -> str:
    """How much of the gradients lies inside the band, by where the gradient comes from."""
    shares: dict[bool, list[float]] = {True: [], False: []}
    for run in runs.values():
        if "refused" in run or (found := scores(run))["inside"] is None:
            continue
        if found["gradient_error"] < FAILED:
            shares["loss" not in run].append(found["inside"])
    white, own = (
        f"{np.mean(shares[kind]):.2f} ({min(shares[kind]):.2f} to {max(shares[kind]):.2f})"
        for kind in (True, False)
    )
    return (
        f"With a white gradient at the top (torch's own modules) the band holds {white} of all "
        f"points, with the module's own loss {own}."
    )


def _failed(runs: dict[str, Run]) -> str:
    """Cases whose gradient is not as predicted, with what the prediction itself warned of."""
    lines = []
    for key, run in runs.items():
        if "refused" in run or scores(run)["gradient_error"] < FAILED:
            continue
        off = float(np.exp(scores(run)["gradient_error"]))
        notes = run.get("notes", ())
        said = f"{len(notes)} times, first: {notes[0]}" if notes else "of nothing"
        lines.append(
            f"* **Failed: {_worded(key)}.** The gradient is off by a factor {off:.1f} on average "
            f"over layers. The prediction warns {said}.\n"
        )
    return "".join(lines)


def _worded(key: str, with_depth: bool = True) -> str:
    if key.count("/") != 2:
        return key
    kind, layers, dropout = key.split("/")
    depth = f" at N = {layers}" if with_depth else ""
    return kind + depth + (", dropout 0" if dropout == "0" else "")


def _refused(runs: dict[str, Run]) -> list[str]:
    rows = {
        key.split("/")[0] + (", dropout 0" if key.endswith("/0") else ""): run["refused"]
        for key, run in runs.items()
        if "refused" in run
    }
    if not rows:
        return []
    found = ["\n## Where the scheme is refused\n\n"]
    return found + [f"* **{name}**: {reason}.\n" for name, reason in rows.items()]
