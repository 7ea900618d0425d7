"""docs/first-step.md, from what `first_step.py` stored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

HEAD = """# The first step of an optimizer: predicted, and measured on real modules

<!-- written by `python benchmarks/first_step.py page`; edit benchmarks/first_step_page.py -->

`prediction.after("adam", learning_rate=1e-3)` gives the network after the first step of an
optimizer on the batch that was predicted, from its kernels alone; `moments.torch.measure_step`
takes the same step on a real module. Derivations: [theory/first-step.md](theory/first-step.md).

```py
p = moments.predict(moments.from_huggingface(config, seq_len=32), token_ids=ids)
step = p.after("adam", 1e-3)  # loss, stream, every site, every matrix
step.table(), step.weights(), step.plot()
moments.learning_rate(model, "adam")  # the rate at which the stream changes by a tenth
```

Modules are Hugging Face's, freshly initialised as transformers does (`std` .02 unless a row says
otherwise), with their own heads, losses and dropout, in training mode with one mask; real text of 2
x 32 tokens (two pictures for ViT); width 128, 4 layers, vocabulary 512. Measured values are means
over draws of the weights with their standard errors. No constant is fitted. GPT-2, and Llama at
1/sqrt(d), were looked at while the theory was being written: averages over hidden units and Muon's
over singular values came of them. Llama, BERT, ViT and GPT-NeoX were first run when it stood; one
fault found by BERT, in tables that a hidden layer parts from the head, was mended. T5 was run next,
and showed what attention of logits of variance 1 lacked (heads of the first layers changed by a
quarter of what was measured): draws of heads came of it. The scatter of overlaps came of the sweeps
below, and the draws of the network that Muon's step and alignment are taken over, of the errors in
those at these modules and at the second group, held out until then. What nobody looked at before
all that stood is the third, [chosen next](#modules-chosen-next). Sizes and streams that still lay
outside had three causes: Muon's steps were carried by their mean over draws (T5's stream), draws
went back through matrices of their own (ViT's sizes), heads of ALiBi were taken alike (BLOOM's).
After that a fourth group was [predicted before it was
run](#modules-predicted-before-they-were-run). Rows are of 10 draws, of 60 under SGD and Muon; of T5
and GPT-2 under SGD of 240, see below. Every row keeps what its module read, and is predicted for
that alone.
"""


def rows(data: dict[str, Any], kind: str) -> Iterator[tuple[list[str], float, Any, Any]]:
    """(parts of the key, rate, measured, predicted) of one kind of case."""
    for key, rates in data.items():
        if key.startswith(f"{kind}/"):
            # a name may itself hold a slash
            parts = [key[len(kind) + 1 : key.rindex("/")], key[key.rindex("/") + 1 :]]
            for rate, row in rates.items():
                if "predicted" in row:
                    yield parts, float(rate), row["measured"], row["predicted"]


def beyond(measured: Any, predicted: Any) -> float:
    """Relative error of the loss's change beyond twice the standard error."""
    size = abs(measured["loss_change"])
    error = abs(predicted["loss_change"] - measured["loss_change"])
    return max(error - 2 * measured["loss_change_stderr"], 0.0) / size


def last_share(measured: Any) -> float:
    """Relative change of the last stream."""
    return float(measured["relative_change"][-1])


def errors(data: dict[str, Any], of: str = "family") -> dict[str, list[tuple[float, str]]]:
    """Of the whole page: where the stream changes by less than .3, its error; and the matrices'."""
    found: dict[str, list[tuple[float, str]]] = {
        "stream": [],
        "update": [],
        "alignment": [],
        "update of SGD and Muon": [],
    }
    for (name, optimizer), rate, measured, predicted in rows(data, of):
        said = f"{name}, {optimizer} {rate:g}"
        seen = np.array(measured["relative_change"])
        stderr = np.nan_to_num(np.array(measured["relative_change_stderr"]))
        told = np.array(predicted["relative_change"])
        small = (seen < 0.3) & (seen > 0)
        if small.any():
            excess = np.maximum(np.abs(told / seen - 1) - 2 * stderr / seen, 0.0)[small]
            found["stream"].append((float(excess.max()), said))
        by = {(int(a), b): (u, al) for a, b, u, al in predicted["weights"]}
        for layer, weight, size, size_error, aligned, aligned_error in measured["weights"]:
            if (int(layer), weight) not in by:
                continue
            update, alignment = by[int(layer), weight]
            where = f"{said}, {weight} of layer {int(layer)}"
            kind = "update" if optimizer == "adam" else "update of SGD and Muon"
            if size:
                over = max(abs(update / size - 1) - 2 * (size_error or 0) / size, 0.0)
                found[kind].append((over, where))
            if math.isfinite(aligned or math.nan) and math.isfinite(alignment):
                over = max(abs(alignment - aligned) - 2 * (aligned_error or 0), 0.0)
                found["alignment"].append((over, where))
    return found


def families(data: dict[str, Any], kind: str = "family") -> str:
    lines = [
        "| module | optimizer | rate | loss change measured | predicted | error | linear |"
        " stream's relative change, last layer, measured / predicted |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (name, optimizer), rate, measured, predicted in rows(data, kind):
        change, stderr = measured["loss_change"], measured["loss_change_stderr"]
        told = predicted["loss_change"]
        mark = "" if beyond(measured, predicted) <= 0.05 else " **x**"
        lines.append(
            f"| {name} | {optimizer} | {rate:g} | {change:.4f} ({stderr:.4f}) | {told:.4f} | "
            f"{100 * (told / change - 1):+.1f} %{mark} | {measured['slope'] * rate:.3g} | "
            f"{last_share(measured):.3g} / {predicted['relative_change'][-1]:.3g} |"
        )
    return "\n".join(lines)


def verdicts(data: dict[str, Any], of: str = "family") -> str:
    found = [(beyond(m, p), k, r, m, p) for k, r, m, p in rows(data, of)]
    inside = sum(over <= 0.05 for over, *_ in found)
    lines = [
        f"- Change of the loss within 5 % beyond twice the standard error: {inside} of "
        f"{len(found)} rows; those marked **x** are not."
    ]
    named = {
        "stream": ("Relative change of the stream, where it is below .3", 0.10, "relative"),
        "update": ("Update sizes under Adam", 0.03, "relative"),
        "update of SGD and Muon": ("Update sizes under SGD and Muon", 0.03, "relative"),
        "alignment": ("Alignment exponents", 0.02, "absolute"),
    }
    for kind, values in errors(data, of).items():
        if not values:
            continue
        title, bound, how = named[kind]
        each = np.array([value for value, _ in values])
        worst = max(values)
        lines.append(
            f"- {title}, {how} error beyond twice the standard error: within {bound:g} at "
            f"{np.sum(each <= bound)} of {len(each)}, outside at {np.sum(each > bound)}; largest "
            f"{worst[0]:.3f} ({worst[1]})."
        )
    return "\n".join(lines)


def outside(data: dict[str, Any], of: str = "family") -> str:
    """Where the bounds of streams, update sizes and alignment are not kept, by module."""
    lines = []
    found = errors(data, of)
    for kind, bound, what in (
        ("stream", 0.10, "relative change of the stream"),
        ("update", 0.03, "update sizes under Adam"),
        ("update of SGD and Muon", 0.03, "update sizes under SGD and Muon"),
        ("alignment", 0.02, "alignment"),
    ):
        by: dict[str, list[float]] = {}
        for value, said in found[kind]:
            if value > bound:
                module, _, rest = said.rpartition(", ") if kind == "stream" else _place(said)
                by.setdefault(f"{module}, {rest}", []).append(value)
        told = "; ".join(
            f"{name} ({len(values)}, up to {max(values):.2f})" for name, values in by.items()
        )
        lines.append(f"- {what}: {told or 'everywhere inside'}.")
    return "\n".join(lines)


def _place(said: str) -> tuple[str, str, str]:
    """Of "MODULE, OPTIMIZER RATE, MATRIX of layer N": module and optimizer, and the matrix."""
    module, step, matrix = said.rsplit(", ", 2)
    return f"{module}, {step.split()[0]}", "", matrix.split(" of ")[0]


def several(data: dict[str, Any]) -> str:
    """Steps after the first."""
    lines = [
        "| module | optimizer | steps | rate | loss change of the last batch measured | predicted |"
        " error | stream's relative change, last layer, measured / predicted |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (head, steps), rate, measured, predicted in rows(data, "steps"):
        name, _, optimizer = head.rpartition("/")
        optimizer = "sgd, momentum .9" if optimizer == "sgd" else optimizer
        error = predicted["loss_change"] / measured["loss_change"] - 1
        mark = " **x**" if beyond(measured, predicted) > 0.05 else ""
        lines.append(
            f"| {name} | {optimizer} | {steps} | {rate:g} | {measured['loss_change']:.4f} "
            f"({measured['loss_change_stderr']:.4f}) | {predicted['loss_change']:.4f} | "
            f"{100 * error:+.1f} %{mark} | {last_share(measured):.3g} / "
            f"{predicted['relative_change'][-1]:.3g} |"
        )
    return "\n".join(lines)


def several_verdict(data: dict[str, Any]) -> str:
    found = list(rows(data, "steps"))
    # as the note of `FirstStep` has it
    near = [
        (m, p)
        for _, rate, m, p in found
        if last_share(p) < 0.3 and 2 * p["loss_change"] / (p["slope"] * rate) - 1 >= 0.5
    ]
    inside = sum(beyond(m, p) <= 0.05 for m, p in near)
    total = sum(beyond(m, p) <= 0.05 for _, _, m, p in found)
    return (
        f"Within 5 % beyond twice the standard error: {inside} of the {len(near)} rows that no "
        "warning meets (the stream changes by less than .3 and half of the loss's slope is left), "
        f"{total} of all {len(found)}; the others are marked **x**."
    )


def sweeps(data: dict[str, Any]) -> str:
    lines = [
        "| along | parametrisation | size | stream's relative change, last layer: measured |"
        " predicted | loss change measured | predicted |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind, axis in (("width", "d_model"), ("depth", "layers")):
        found = sorted(rows(data, kind), key=lambda row: (row[0][0], int(row[0][1])))
        for (name, size), _, measured, predicted in found:
            stderr = measured["relative_change_stderr"][-1]
            lines.append(
                f"| {axis} | {name} | {size} | {last_share(measured):.4f} ({stderr:.4f}) | "
                f"{predicted['relative_change'][-1]:.4f} | {measured['loss_change']:.4f} "
                f"({measured['loss_change_stderr']:.4f}) | {predicted['loss_change']:.4f} |"
            )
    return "\n".join(lines)


def sweep_picture(data: dict[str, Any]) -> Any:
    """Coordinate checks along width and depth: lines predicted, points measured."""
    from matplotlib.figure import Figure

    from moments.show.palette import DASHES, MARKERS, SERIES

    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    figure.suptitle("GPT-2 modules, untied: the stream's relative change in Adam's first step")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, kind, label in zip(axes, ("width", "depth"), ("d_model", "layers"), strict=True):
        curves: dict[str, list[Any]] = {}
        for (name, size), _, measured, predicted in rows(data, kind):
            stderr = measured["relative_change_stderr"][-1]
            point = int(size), last_share(measured), stderr, last_share(predicted)
            curves.setdefault(name, []).append(point)
        for name, points in curves.items():
            place = ("mup", "standard", "depth-mup", "completep").index(name)
            x, seen, stderr, told = (np.array(part) for part in zip(*sorted(points), strict=True))
            color, marker = SERIES[place], MARKERS[place]
            ax.plot(x, told, color=color, linestyle=DASHES[place])
            ax.errorbar(x, seen, 2 * stderr, color=color, marker=marker, linestyle="", label=name)
        ax.set(xscale="log", yscale="log", xlabel=label)
        sizes = sorted({point[0] for points in curves.values() for point in points})
        ax.set_xticks(sizes, [str(size) for size in sizes])
        ax.minorticks_off()
        ax.legend(frameon=False, title="points: measured, 2 s.e.; lines: predicted")
    axes[0].set_ylabel("E |dh|\u00b2 / E |h|\u00b2, last layer")
    return figure


def exponents(data: dict[str, Any]) -> str:
    """The theory's rates and what their logarithms' slopes are."""
    lines = [
        "| optimizer | parametrisation | along | sizes | rates | exponent, first to last |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for optimizer, name, along, sizes, rates, _ in data.get("exponents", ()):
        if name == "completep" and optimizer != "adam":
            continue
        slope = math.log(rates[-1] / rates[0]) / math.log(sizes[-1] / sizes[0])
        told = ", ".join(f"{rate:.3g}" for rate in rates)
        lines.append(
            f"| {optimizer} | {name} | {along} | {', '.join(map(str, sizes))} | {told} | "
            f"{slope:+.2f} |"
        )
    return "\n".join(lines)


def timing(data: dict[str, Any]) -> str:
    """Processor time on GPT-2 small."""
    found = data.get("timing")
    if found is None:
        return ""
    return (
        "## Time\n\nGPT-2 small (12 layers of width 768), 2 x 128 tokens, processor time on one "
        f"core of a shared machine, least of {found['repeats']}: "
        f"`predict` {found['predict']:.1f} s, `after` {found['after']:.1f} s (between "
        f"{found['after']:.1f} and {found['slowest']:.1f} s by what else ran; it predicts the "
        "text token by token first, which is two fifths of it), at every further "
        f"rate {found['again']:.1f} s. One real step of one draw of the weights takes "
        f"{found['measured']:.0f} s.\n\n"
    )


def sweep_verdict(data: dict[str, Any]) -> str:
    found = [row for kind in ("width", "depth") for row in rows(data, kind)]
    over = [
        max(abs(p["relative_change"][-1] - last_share(m)) - 2 * m["relative_change_stderr"][-1], 0)
        / last_share(m)
        for *_, m, p in found
    ]
    inside = sum(value <= 0.1 for value in over)
    return (
        f"The stream's change is within 10 % beyond twice the standard error at {inside} of "
        f"{len(found)} sizes, the loss's within 5 % at "
        f"{sum(beyond(m, p) <= 0.05 for *_, m, p in found)}."
    )


def page(data: dict[str, Any]) -> str:
    seconds = sum(
        next(iter(rates.values()))["measured"]["seconds"]
        for key, rates in data.items()
        if key not in ("exponents", "timing") and rates
    )
    return f"""{HEAD}
## The loss after one step

"linear" is the measured slope times the rate: where it parts from what is measured, the loss is no
longer linear in the step.

{families(data)}

{verdicts(data)}

Outside these bounds, by module (how many, and by how much at most):

{outside(data)}

T5's sizes of queries and keys under SGD, by 60 draws 12 % too large in the last layer (s.e. 3.5),
had no cause but the draws: by 240, the 60 among them, they are within 2 %. So with Pythia's values
below, 7.2 % (s.e. 2.0) by 120 draws and 3.2 % (1.2) by 360. These modules were measured again
because they lay outside; GPT-2 as the first of all, for which there was no time.

## Modules held out

Families, widths and depths that the theory was not looked at on, 30 draws of their own, 120 under
SGD. Three faults that they found are mended: under Adam, features that only tokens without gradient
see (OPT's ReLU; the change of its last layer came out 2.5 times too large, and beyond 3e-4 not at
all); the referee's Muon stepped by Adam where queries, keys and values are one matrix head by head
(Pythia, BLOOM); and heads were maps of tokens of their own, not of one draw's (Muon at OPT, Phi). A
quarter of their update sizes under Muon and SGD lay outside 3 % then (620 of 840 inside), and
alignment up to .05 off: draws of the network in place of means over draws, made for that, are in
the rows below, which for loss and stream are still of modules held out. Streams that one direction
common to all tokens fills scatter by a fifth from draw to draw: the first ten draws of Qwen2, run
alone, left the prediction of the stream's change 27 % too large, two times twenty others 6 % too
large and 3 % too small (s.e. 4 and 3 %).

{families(data, "held")}

{verdicts(data, "held")}

Outside these bounds:

{outside(data, "held")}

## Modules chosen next

Families, widths, depths and attention (local, of one key head) of which nothing had been run when
all of the above stood, chosen before they were, 60 draws of their own. They were first measured on
another machine, whose Python has another text, and predictions for the text of this one held
against that: 28 update sizes and 5 streams lay outside, values of DistilBERT by .16. Measured anew
on the text that is predicted, by the seeds that were set before, no stream and 12 sizes, all of
queries and keys, lay outside (so with Muon's further steps, below), and three faults could be told:
what tables and the projection of patches share was left out (ViT's first stream under SGD 20 to 25
% too small, under signs 5 %); signs of gradients that are nearly one were taken to add up by the
cube of their correlation (12 layers of width 64 under Muon: the stream's change 12 % too large, its
loss at 3e-3 6 % too small); queries and keys met overlaps by few draws. Those are mended, by
derivations that no row entered, so that for them this group is a check of the mending and no fresh
one.

{families(data, "fresh")}

{verdicts(data, "fresh")}

Outside these bounds:

{outside(data, "fresh")}

## Modules predicted before they were run

Chosen, and predicted, when all of the above stood: ALiBi of more heads than are followed one by
one, the multipliers of Granite, a width of 96 with norms without gains (OLMo), layers whose two
branches read one norm beside a scale of the logits (Cohere). 20 draws of their own, 60 under SGD.
What tables of a tied head have in common with what branches give was added afterwards, of Gemma's
stream; predictions made before that kept the bounds of loss and stream in all rows, too.

{families(data, "last")}

{verdicts(data, "last")}

Outside these bounds:

{outside(data, "last")}

## Several steps

With `steps=k` the sequences of a prediction are the batches of k steps, 2 x 32 tokens each here,
and the loss is that of the last batch; `measure_step(..., steps=k)` takes them with torch's
optimizer, or by Lion, or by Muon with its author's momentum of .95. Gradients are those of the
network before the first step. Every step draws its dropout masks; sites and losses are those under
the masks of their own batch. Muon's rows were measured before its theory was written, and brought
to light what rows of the head did under Adam (Llama's and Mistral's loss of the fourth batch came
out 35 and 44 % too good): no constant is fitted to them. What rows marked **x** lack is that
gradients change: four Muon steps at 3e-3 of BERT's modules along the gradients before the first
lower the loss by .476 (s.e. .027), those of GPT-2, untied, at 1e-3 by .230 (.005), Llama's two at
3e-3 by .479 (.021).

{several(data)}

{several_verdict(data)}

{timing(data)}## Width and depth

GPT-2 modules, untied, base width 64 and 4 layers at std .02, Adam at {RATE:g} times what the
parametrisation says; hidden variances as 1/width. Under `standard` the rate of hidden matrices
stays and the stream changes by more the wider the network; under `mup` it follows 1/width, the
logits are multiplied by 1/width, and changes stay. Along depth, `mup` leaves branches as they are,
`depth-mup` and `completep` multiply them, on the modules by a hook behind each block.

![The stream's change along width and depth](first-step-sweeps.png)

{sweeps(data)}

{sweep_verdict(data)}

`moments.step.search.transfer` gives the rate at which the first step changes the stream by a tenth,
the parametrisation's factors applied: an exponent of 0 is transfer, which mup states along width,
depth-mup and completep along depth too. Theory alone, one text of 32 words by Zipf's law; Muon with
its step scaled by sqrt(m/n).

{exponents(data)}

## Where it is wrong

- **Attention whose logits have a variance of order 1** moves to first order in the logits: the
  loss of T5 at Adam 1e-3 is 8 % too good, heads of its first layer change by up to 12 % more.
- **Steps that are most of the new stream** (beyond .9, where a warning says so), SGD's above all.
- **SGD's gradients scatter** by a fifth from draw to draw, more where one class token or one
  direction fills the stream, and with them all layers' sizes at once.
- **Muon's sizes where few tokens send** (ViT, whose class token alone has a target) are averages
  over 226 draws, of which single ones scatter by a sixth.
- **Muon's queries and keys** move logits by the mean of their P over draws.
- Further steps with gradients as they are before the first: see the rows marked above.
- Not covered, and refused by name: norms of queries and keys, soft caps, biases of queries and keys
  that are drawn, DyT, groups of norms, padding and packed rows, label smoothing; encoder-decoders
  whose encoder has a token table of its own. A table of relative biases stays as it is: a
  ten-thousandth of T5's slope.

Measured on one shared core: {seconds:.0f} s of processor time in all.
"""


RATE = 3e-4
