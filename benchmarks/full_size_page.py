"""The page docs/full-size.md and its picture, from stored measurements and stored predictions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import real_modules_compare
from full_size import CASES, MATRICES, Case, bins, mean_of, places, points, stored
from real_modules_page import BOUNDS, TITLES
from scipy.stats import t as student

from moments.show import palette

PAGE = Path(__file__).parent.parent / "docs" / "full-size.md"
PICTURE = PAGE.with_name("full-size.png")
POST_LN = ("BERT", "RoBERTa", "post-LN")
"""Whose gradient is held to the band of one draw, where it has one: they have many layers."""


@dataclass(frozen=True)
class Gap(real_modules_compare.Gap):
    """Errors of one quantity with their standard errors, (k,) each, and the bound."""

    bound: float
    draws: int

    def outside(self, allowed: float) -> bool:
        """Whether an error is beyond its bound by more than so many standard errors."""
        stderr = np.nan_to_num(self.stderr)
        return bool((np.abs(self.error) - allowed * stderr > self.bound).any())

    @property
    def verdict(self) -> str:
        """ "pass", "open" (outside by 2 s.e., within what so few draws leave open), "fails"."""
        if not self.outside(2.0):
            return "pass"
        if self.draws < 2:
            return "open"
        return "fails" if self.outside(float(student.ppf(0.975, self.draws - 1))) else "open"


def predicted(kept: Mapping[str, Any], name: str) -> np.ndarray:
    row = kept["predicted"]["values"].get(name, [])
    return np.array([math.nan if x is None else x for x in row], dtype=float)


def smoothed(stderr: np.ndarray) -> np.ndarray:
    """Root mean square over a tenth of the stream: of two draws, places where they happen to agree
    have next to no standard error of their own."""
    count = max(1, len(stderr) // 10)
    window = np.ones(2 * count + 1)
    known = np.convolve(np.ones(len(stderr)), window, "same")
    return np.asarray(np.sqrt(np.convolve(stderr**2, window, "same") / known))


def stream_gap(kept: Mapping[str, Any], name: str, bound: float) -> Gap | None:
    """Relative errors over the places of the stream; a correlation's absolute."""
    if name not in kept["values"]:
        return None
    measured, error = mean_of(kept, name)
    if name == "correlation":
        measured, scale = mean_of(kept, "covariance")[0] / mean_of(kept, "variance")[0], 1.0
    else:
        scale = measured
    said = predicted(kept, name)
    if not said.size:
        return None
    relative = error / scale
    if len(relative) > 1 and kept["seeds"] > 1:
        relative = smoothed(relative)
    return Gap((said - measured) / scale, relative, bound, kept["seeds"])


def is_matrix(name: str) -> bool:
    return not name.endswith((".bias", ".gain"))


def weight_gaps(kept: Mapping[str, Any]) -> tuple[Gap | None, Gap | None, dict[str, Gap]]:
    """Of every matrix, of all parameters summed, and by role."""
    names = kept["names"]["weights"]
    measured, error = mean_of(kept, "weights")
    said, draws = predicted(kept, "weights"), kept["seeds"]
    known = np.isfinite(said) & (measured > 1e-12 * measured.max())
    if not known.any():
        return None, None, {}
    matrix = known & np.array([is_matrix(name) for name in names])

    def summed(which: np.ndarray, bound: float) -> Gap:
        # parameters of one draw are correlated: the sum of the errors is an upper bound
        whole = measured[which].sum()
        gap = np.array([said[which].sum() / whole - 1]), np.array([error[which].sum() / whole])
        return Gap(*gap, bound, draws)

    roles = [name.split(" ", 1)[1] for name in names]
    noise = error / np.where(measured > 0, measured, 1.0)
    for role in set(roles):
        which = known & np.array([r == role for r in roles])
        noise[which] = math.sqrt(float((noise[which] ** 2).mean())) if which.any() else 0.0
    off = said[matrix] / measured[matrix] - 1
    each = Gap(off, noise[matrix], BOUNDS["matrices"], draws)
    by_role = {}
    for role in dict.fromkeys(r for r, m in zip(roles, matrix, strict=True) if m):
        which = matrix & np.array([r == role for r in roles])
        by_role[role] = summed(which, BOUNDS["matrices"])
    return each, summed(known, BOUNDS["total"]), by_role


def gaps(kept: Mapping[str, Any]) -> dict[str, Gap]:
    """Every quantity that was both measured and predicted."""
    found = {name: stream_gap(kept, name, BOUNDS[name]) for name in list(BOUNDS)[:4]}
    found["matrices"], found["total"], _ = weight_gaps(kept)
    return {name: gap for name, gap in found.items() if gap is not None}


def outside_band(kept: Mapping[str, Any]) -> int | None:
    """Places whose measured mean gradient is outside the band of one draw; None: no band."""
    band = predicted(kept, "band")
    if not band.size:
        return None
    measured = mean_of(kept, "grad_variance")[0]
    low, high = band.reshape(2, -1)[:, points(band.size // 2 - 1)]
    return int(((measured < low) | (measured > high)).sum())


def verdicts(name: str, kept: Mapping[str, Any]) -> dict[str, str]:
    found = {quantity: gap.verdict for quantity, gap in gaps(kept).items()}
    outside = outside_band(kept) if any(part in name for part in POST_LN) else None
    if outside is not None:
        found["grad_variance"] = "fails" if outside else "pass"
    return found


def row_line(name: str, case: Case, kept: Mapping[str, Any]) -> str:
    found, said = gaps(kept), verdicts(name, kept)
    cells = []
    for quantity in BOUNDS:
        gap = found.get(quantity)
        if gap is None:
            cells.append("")
            continue
        if quantity in ("loss", "total"):
            error = 100 * gap.stderr[0]
            text = f"{100 * gap.error[0]:+.2f}"
            text += "" if math.isnan(error) else f" ± {error:.2f}"
        else:
            text = f"{100 * gap.mean:.2f} ({100 * gap.worst:.2f})"
        mark = {"pass": text, "open": f"*{text}*", "fails": f"**{text}**"}
        cells.append(mark[said[quantity]])
    worst = next((v for v in ("fails", "open") if v in said.values()), "pass")
    tokens = case_tokens(case)
    start = f"| {name} | {tokens} | {kept['seeds']} | "
    return start + " | ".join(cells) + f" | {worst} |"


def case_tokens(case: Case) -> str:
    if case.seq_len is None and case.config is not None:
        return f"{case.batch} x 197"
    length = case.seq_len or case.model().seq_len
    return str(length) if case.batch == 1 else f"{case.batch} x {length}"


HEADER = (
    "| model | tokens | draws | " + " | ".join(TITLES.values()) + " | verdict |\n"
    "|---|--:|--:|" + "--:|" * len(TITLES) + "---|"
)


# --- first steps ---------------------------------------------------------------------------------

STEP_BOUNDS = {"loss_change": 0.05, "relative_change": 0.10, "update_variance": 0.10}


def step_lines(data: Mapping[str, Any]) -> list[str]:
    lines = [
        "| model | optimizer | rate | draws | loss change, measured | predicted | error "
        "| stream's change, worst | update sizes, worst | alignment, worst |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for case in CASES:
        kept = data["cases"].get(case.name)
        if case.kind != "step" or kept is None or "predicted" not in kept:
            continue
        for rate in case.rates:
            cells = [case.name.partition(",")[0], case.optimizer, f"{rate:g}", str(kept["seeds"])]
            measured, error = (float(x[0]) for x in mean_of(kept, f"{rate:g}/loss_change"))
            said = float(predicted(kept, f"{rate:g}/loss_change")[0])
            cells += [f"{measured:.4g} ({error:.2g})", f"{said:.4g}"]
            cells.append(f"{100 * (said / measured - 1):+.1f} %")
            for name in ("relative_change", "update_variance"):
                value = mean_of(kept, f"{rate:g}/{name}")[0]
                gap = np.abs(predicted(kept, f"{rate:g}/{name}") / value - 1)
                cells.append(f"{100 * np.nanmax(gap):.1f} %")
            aligned = mean_of(kept, f"{rate:g}/alignment")[0]
            off = np.abs(predicted(kept, f"{rate:g}/alignment") - aligned)
            cells.append(f"{np.nanmax(off):.3f}")
            lines.append("| " + " | ".join(cells) + " |")
    return lines if len(lines) > 2 else []


# --- the band ------------------------------------------------------------------------------------


def band_rows(kept: Mapping[str, Any]) -> list[tuple[int, float, float]]:
    """Place, share of draws inside the band, predicted over measured deviation of the log."""
    low, high = predicted(kept, "band").reshape(2, -1)
    draws = np.array(kept["samples"]["grad_variance"])
    inside = ((draws >= low) & (draws <= high)).mean(0)
    spread = np.log(high / low) / (2 * 1.959964)
    ratio = spread / np.log(draws).std(0, ddof=1)
    return [(n, float(inside[n]), float(ratio[n])) for n in range(len(low))]


def band_lines(kept: Mapping[str, Any]) -> list[str]:
    lines = [
        "| place of the stream | inside the 95 % band | deviation of the log, predicted over "
        "measured |",
        "|--:|--:|--:|",
    ]
    rows = band_rows(kept)
    lines += [f"| {n} | {100 * share:.1f} % | {ratio:.3f} |" for n, share, ratio in rows]
    return lines


# --- positions -----------------------------------------------------------------------------------

PROFILES = (
    "GPT-2, 1024 tokens",
    "BLOOM 1.7B",
    "Pythia 1.4B",
    "Mistral 7B, 8 layers, window 2048",
    "Llama 3 8B, twin, Gaussian tokens",
    "Llama 3 8B, twin",
)


def profile_of(kept: Mapping[str, Any], name: str, layers: int) -> tuple[np.ndarray, ...]:
    """(places, bins) measured, its standard error, predicted."""
    count = len(places(layers))
    measured, error = (row.reshape(count, -1) for row in mean_of(kept, name))
    return measured, error, predicted(kept, name).reshape(count, -1)


def profile_lines(data: Mapping[str, Any]) -> list[str]:
    lines = [
        "| model | quantity, halfway up | " + " | ".join(POSITIONS) + " |",
        "|---|---|" + "--:|" * len(POSITIONS),
    ]
    for case in CASES:
        kept = data["cases"].get(case.name)
        if case.name not in PROFILES or kept is None or "predicted" not in kept:
            continue
        model = case.model()
        for name, words in (("token_variance", "variance"), ("token_grad_variance", "gradient")):
            measured, error, said = profile_of(kept, name, model.layers)
            half = len(measured) // 2
            cells = []
            for label in POSITIONS:
                first = int(label.split()[0]) - 1
                index = [s.start for s in bins(model.seq_len)]
                if first not in index:
                    cells.append("")
                    continue
                k = index.index(first)
                off = 100 * (said[half, k] / measured[half, k] - 1)
                bar = 100 * error[half, k] / measured[half, k]
                cells.append(f"{off:+.1f}" + ("" if math.isnan(bar) else f" ± {bar:.1f}"))
            lines.append(f"| {case.name} | {words} | " + " | ".join(cells) + " |")
    return lines


# bins begin at 0 and at powers of two; people count from 1
POSITIONS = (
    "2",
    "5 to 8",
    "33 to 64",
    "257 to 512",
    "1025 to 2048",
    "2049 to 4096",
    "4097 to 8192",
)


# --- in words ------------------------------------------------------------------------------------


def roles_line(name: str, kept: Mapping[str, Any], columns: Iterable[str]) -> str:
    _, _, by_role = weight_gaps(kept)
    cells = []
    for role in columns:
        gap = by_role.get(role)
        bar = math.nan if gap is None else 100 * gap.stderr[0]
        text = "" if gap is None else f"{100 * gap.error[0]:+.1f}"
        cells.append(text if math.isnan(bar) else f"{text} ± {bar:.1f}")
    return f"| {name} | {kept['seeds']} | " + " | ".join(cells) + " |"


def role_lines(rows: list[tuple[str, Mapping[str, Any]]]) -> list[str]:
    columns = [*MATRICES, "token", "head"]
    return [
        "| model | draws | " + " | ".join(columns) + " |",
        "|---|--:|" + "--:|" * len(columns),
        *(roles_line(name, kept, columns) for name, kept in rows),
    ]


def by_word(kept: Mapping[str, Any]) -> bool:
    return bool(kept["predicted"]["resolution"].endswith("words"))


def page(data: Mapping[str, Any]) -> str:
    """The whole page."""
    rows = [
        (case, data["cases"][case.name])
        for case in CASES
        if case.kind != "step" and "predicted" in data["cases"].get(case.name, {})
    ]
    deep = [(c, k) for c, k in rows if "LN, " in c.name]
    texts = [(c, k) for c, k in rows if by_word(k)]
    plain = [(c, k) for c, k in rows if (c, k) not in deep and (c, k) not in texts]
    parts = [
        INTRODUCTION.format(machine=data["machine"]),
        summary(plain, texts, deep),
        "## By token, tokens alike, or classes of positions",
        table(plain),
        ALIKE,
        "## Long texts under strong logits, word by word",
        text_words(texts, data["cases"]["Llama 3 8B, twin, Gaussian tokens"]),
        table(texts),
        *repeat_parts(data),
        "### Every matrix",
        "Squared gradient norms, summed over layers: error in percent ± standard error.",
        "\n".join(role_lines([(c.name, k) for c, k in [*plain, *texts] if has_weights(k)])),
        "## Position by position",
        POSITION_WORDS,
        "\n".join(profile_lines(data)),
        "## Many layers",
        DEEP_WORDS,
        table(deep),
    ]
    band = data["cases"].get("GPT-2, band")
    if band is not None and "predicted" in band:
        parts += ["## The band of one draw", band_words(band), "\n".join(band_lines(band))]
    steps = step_lines(data)
    if steps:
        parts += ["## The first step of an optimizer", STEP_WORDS, "\n".join(steps)]
    parts += ["## What it cost", cost(data)]
    wanted = [case.name for case in CASES if case.name not in data["cases"]]
    if wanted:
        parts += [
            "## Not measured yet",
            "Wanted, and left when the GPU was: " + "; ".join(wanted) + ".",
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def has_weights(kept: Mapping[str, Any]) -> bool:
    return bool(weight_gaps(kept)[2])


def table(rows: list[tuple[Case, Mapping[str, Any]]]) -> str:
    return "\n".join([HEADER, *(row_line(case.name, case, kept) for case, kept in rows)])


def summary(*groups: list[tuple[Case, Mapping[str, Any]]]) -> str:
    words = []
    for rows, what in zip(
        groups,
        ("of other inputs", "long texts under strong logits", "of 192 to 1000 layers"),
        strict=True,
    ):
        said = [set(verdicts(case.name, kept).values()) for case, kept in rows]
        count = {
            "pass": sum(v == {"pass"} for v in said),
            "open": sum("open" in v and "fails" not in v for v in said),
            "fails": sum("fails" in v for v in said),
        }
        words.append(
            f"* {what}: {len(rows)} cases, {count['pass']} pass, {count['open']} open, "
            f"{count['fails']} fail"
        )
    return "\n".join(words) + "\n\n![Measured points on predicted curves](full-size.png)"


def extremes(rows: list[tuple[Case, Mapping[str, Any]]]) -> dict[str, tuple[float, float]]:
    """Lowest and highest error over cases: of roles, and of places of the stream."""
    found: dict[str, list[float]] = {}
    for _, kept in rows:
        for role, gap in weight_gaps(kept)[2].items():
            key = "query and key" if role in ("query", "key") else "others"
            found.setdefault(key, []).append(float(gap.error[0]))
        for name in ("variance", "correlation", "grad_variance"):
            gap = stream_gap(kept, name, 0.0)
            assert gap is not None
            found.setdefault(name, []).extend(gap.error[1:].tolist())
    return {name: (min(values), max(values)) for name, values in found.items()}


def text_words(rows: list[tuple[Case, Mapping[str, Any]]], bare: Mapping[str, Any]) -> str:
    found = gaps(bare)
    gaussian = ", ".join(
        f"{100 * found[name].mean:.1f} {unit}"
        for name, unit in (
            ("variance", "% (variance)"),
            ("correlation", "hundredths (correlation)"),
            ("grad_variance", "% (gradient)"),
        )
    )
    low = {name: f"{100 * a:+.0f}" for name, (a, _) in extremes(rows).items()}
    high = {name: f"{100 * b:+.0f}" for name, (_, b) in extremes(rows).items()}
    return TEXTS.format(low=low, high=high, gaussian=gaussian, draws=bare["seeds"])


def repeat_parts(data: Mapping[str, Any]) -> list[str]:
    """The same text by token, by classes and run."""
    rows = data.get("repeats", [])
    if not rows:
        return []
    columns = (*MATRICES, "token", "head")
    lines = [
        "| tokens | held | correlation behind layer 1 | " + " | ".join(columns) + " |",
        "|--:|---|--:|" + "--:|" * len(columns),
    ]
    run: dict[str, float] = {}
    for row in rows:
        cells = [str(row["tokens"]), row["held"], f"{row['correlation'][1]:.3f}"]
        if row["held"] == "run":
            run = row["norms"]
            cells[2] += f" ± {row['correlation_stderr'][1]:.3f}"
            cells += ["" for _ in columns]
        else:
            cells += [f"{100 * (row['norms'][name] / run[name] - 1):+.0f}" for name in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return ["### Where it comes from", REPEAT_WORDS, "\n".join(lines)]


def band_words(kept: Mapping[str, Any]) -> str:
    rows = band_rows(kept)
    shares, ratios = [100 * s for _, s, _ in rows], [r for *_, r in rows]
    return (
        f"GPT-2's own module, 2 x 128 tokens of text, {kept['seeds']} draws: share of draws whose "
        f"gradient variance lies inside the predicted band of 95 %. A share of 95 % has a standard "
        f"error of {100 * math.sqrt(0.95 * 0.05 / kept['seeds']):.1f} %, the deviation one of "
        f"{100 / math.sqrt(2 * kept['seeds']):.0f} %. Places share their draws. Between "
        f"{min(shares):.1f} and {max(shares):.1f} % lie inside; the predicted deviation is "
        f"{min(ratios):.2f} to {max(ratios):.2f} times the measured one."
    )


def cost(data: Mapping[str, Any]) -> str:
    lines = [
        "Seconds of one draw on the GPU and its memory, and seconds of processor time of the "
        "prediction, one thread.",
        "",
        "| model | a draw, s | memory, GiB | prediction, s | held |",
        "|---|--:|--:|--:|---|",
    ]
    for case in CASES:
        kept = data["cases"].get(case.name)
        if kept is None or "predicted" not in kept:
            continue
        said = kept["predicted"]
        lines.append(
            f"| {case.name} | {kept['seconds']:.1f} | {kept.get('memory', 0):.1f} "
            f"| {said['seconds']:.1f} | {said['resolution']} |"
        )
    return "\n".join(lines)


INTRODUCTION = """# Full size

Published sizes, long texts and many layers on a GPU ({machine}; float32 without TF32), beside
what `moments` predicts from the config and the tokens. `python benchmarks/full_size.py`
measures, predicts and writes this page. "Twin" is `moments.simulate`; every other model is
transformers' own module with its own initialisation and training loss. The text is Python's
help topics, byte-pair encoded. Of Llama 3 8B's module the gradients of all weights do not fit,
and those of layers 1, 11, 22 and 32 and of the token table are taken. `moments.simulate` at
Llama 3 8B's 32 layers and 8192 tokens needs 22 GiB: its attention goes by groups of heads.

Bounds were set before anything was measured: those of [real modules](real-modules.md). An error
beyond twice its standard error may be: forward variance 2 %, correlation .015, gradient
variance 5 % (Post-LN: the band of one draw, where one is predicted), loss .5 %, every weight
matrix's squared gradient norm 8 %, the total 4 %. Entries are mean (worst) over the places of
the stream and over matrices and layers, in percent, of correlations in hundredths; of loss and
total signed, ± the standard error. **Bold** fails. Draws are few: standard errors are root
mean squares over a tenth of the stream's places, and over the layers of a matrix. Of two or three
draws they are still known to a factor: *italics* are outside the bound by two standard
errors and inside the 95 % interval of Student's t for that many draws (of one draw, any), and
stay open. That, and the means of standard errors, were chosen when first results had been seen; the
bounds were not."""

ALIKE = """Two texts of BERT, RoBERTa and T5 at 512 tokens are predicted with tokens alike, which
knows how many tokens are to be predicted and not which: by token they would need 37 GiB. One text
is told token by token, as `predict` does by itself. Several texts or pictures that are held alike,
or one by one, have no prediction of the whole batch's weight gradients."""

TEXTS = """A text longer than 256 tokens is held by classes of positions. With logits as strong
as those of weights of deviation .02 at these widths, keys of one token draw the same attention and
have the same value, so that what two positions share takes two values: of one word and of two.
Forward variance comes out {low[variance]} to {high[variance]} %, correlations {low[correlation]}
to {high[correlation]} hundredths, gradient variance behind the embedding {low[grad_variance]} to
{high[grad_variance]} %, query and key norms {low[query and key]} to {high[query and key]} %, and
other matrices' {low[others]} to {high[others]} %. Means over both, with which these were first
predicted, gave correlations up to 37 hundredths too high, query and key norms up to 76 % too low
and others' between a third and 3.6 times: the measured numbers were known when words were told
apart, and nothing was fitted to them. The same architecture on Gaussian tokens, which do not
repeat, is off by {gaussian} in its {draws} draws at 8192 tokens."""

REPEAT_WORDS = """The same layers at width 512, three of them, with logits as strong as at 4096: run
as a twin (two to four draws), predicted by token, by means over classes of positions, and by
classes of positions and of words. Errors of squared gradient norms are in percent."""

POSITION_WORDS = """Errors in percent ± standard error at half the depth: forward variance and
gradient variance of single positions (counted from 1) and of ranges of them. BLOOM has distance
penalties, Mistral a window of 2048 in a text of 8192."""

DEEP_WORDS = """Torch twins of Kedia et al.'s size: d_model 256, 4 heads, 256 tokens, dropout
.1; LayerNorm Scaling under a causal mask without dropout. Few draws, whose fluctuations grow
with depth: forward variance of one draw alone scatters by some percent. Of Xavier's Post-LN the
predicted band spans orders of magnitude, and the mean over draws with it."""

STEP_WORDS = """One step of transformers' own module with torch's optimizers (and Muon) on 2 x
128 tokens, against `prediction.after`: the loss's change in nats (standard error), the largest
relative error of the stream's change over its places and of a matrix's mean squared update, and
of alignment exponents the largest difference."""


# --- the picture ---------------------------------------------------------------------------------


def picture(data: Mapping[str, Any]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 10.5), layout="constrained")
    figure.suptitle("Full size: measured (points, two standard errors) and predicted (lines)")
    axes = figure.subplots(3, 2)
    by_name = {case.name: case for case in CASES}

    def streams(
        axis: Any, name: str, chosen: list[tuple[str, str]], relative: bool, legend: str = "best"
    ) -> None:
        for k, (label, words) in enumerate(chosen):
            kept = data["cases"].get(label)
            if kept is None or "predicted" not in kept:
                continue
            measured, error = mean_of(kept, name)
            said = predicted(kept, name)
            layers = by_name[label].model().layers
            depth = points(layers) / layers
            over = said[-1] if relative else 1.0
            color, dash = palette.SERIES[k], palette.DASHES[k]
            axis.plot(depth, said / over, color=color, linestyle=dash, label=words)
            some = np.unique(np.linspace(0, len(depth) - 1, 17).round().astype(int))
            bars = 2 * np.nan_to_num(error[some]) / over
            axis.errorbar(
                depth[some],
                measured[some] / over,
                bars,
                fmt=palette.MARKERS[k],
                color=color,
                markersize=4,
                linewidth=1,
            )
        axis.set_xlabel("share of the depth")
        axis.legend(fontsize=7, loc=legend)

    modules = [
        ("GPT-2, 1024 tokens", "GPT-2, 1024 tokens"),
        ("GPT-2 XL", "GPT-2 XL, 1024 tokens"),
        ("BLOOM 1.7B", "BLOOM 1.7B, 2048 tokens"),
        ("Falcon 7B, 8 layers", "Falcon 7B, 8 layers, 2048 tokens"),
        ("Llama 3 8B, twin, Gaussian tokens", "Llama 3 8B, 8192 Gaussian tokens"),
        ("Llama 3 8B, twin", "Llama 3 8B, 8192 tokens of text"),
    ]
    streams(axes[0, 0], "variance", modules, True)
    axes[0, 0].set(title="forward variance over the last predicted", yscale="log")
    streams(axes[0, 1], "correlation", modules, False, "upper left")
    axes[0, 1].set(title="token correlation", ylim=(-0.02, 0.95))
    streams(axes[1, 0], "grad_variance", modules, True)
    axes[1, 0].set(title="gradient variance over the last predicted", yscale="log")
    deep = [
        ("DeepScaleLM, pre-LN, 768 layers", "DeepScaleLM, Pre-LN, 768 layers"),
        ("DeepScaleLM, post-LN, 192 layers", "DeepScaleLM, Post-LN, 192 layers"),
        ("Xavier, pre-LN, 192 layers", "Xavier, Pre-LN, 192 layers"),
        ("LayerNorm Scaling, pre-LN, 1000 layers", "LayerNorm Scaling, 1000 layers"),
    ]
    streams(axes[1, 1], "grad_variance", deep, True)
    axes[1, 1].set(title="gradient variance of deep twins over the last predicted", yscale="log")
    _positions(axes[2, 0], data, by_name)
    _roles(axes[2, 1], data)
    return figure


def _positions(axis: Any, data: Mapping[str, Any], by_name: Mapping[str, Case]) -> None:
    for k, name in enumerate(PROFILES):
        kept = data["cases"].get(name)
        if kept is None or "predicted" not in kept:
            continue
        model = by_name[name].model()
        measured, error, said = profile_of(kept, "token_grad_variance", model.layers)
        half = len(measured) // 2
        where = [1 + (s.start + s.stop - 1) / 2 for s in bins(model.seq_len)]
        over = said[half, 3]
        color = palette.SERIES[k]
        words = name if name != "Llama 3 8B, twin" else "Llama 3 8B, twin, text"
        line = said[half] / over
        axis.plot(where, line, color=color, linestyle=palette.DASHES[k], label=words)
        bars = 2 * np.nan_to_num(error[half]) / over
        style = {"fmt": palette.MARKERS[k], "markersize": 4, "linewidth": 1}
        axis.errorbar(where, measured[half] / over, bars, color=color, **style)
    axis.set(
        title="gradient variance by position halfway up, tokens 5 to 8: 1",
        xlabel="position",
        xscale="log",
        yscale="log",
    )
    axis.legend(fontsize=7)


def _roles(axis: Any, data: Mapping[str, Any]) -> None:
    """Predicted over measured norms by matrix."""
    chosen = [
        "GPT-2, 1024 tokens",
        "GPT-2 XL",
        "Llama 3 8B, twin, Gaussian tokens",
        "BLOOM 1.7B",
        "Llama 3 8B",
        "Llama 3 8B, twin",
    ]
    for k, name in enumerate(chosen):
        kept = data["cases"].get(name)
        if kept is None or "predicted" not in kept:
            continue
        by_role = weight_gaps(kept)[2]
        x = [i + 0.11 * (k - 2.5) for i, role in enumerate(MATRICES) if role in by_role]
        y = [1 + by_role[role].error[0] for role in MATRICES if role in by_role]
        bars = [2 * np.nan_to_num(by_role[r].stderr[0]) for r in MATRICES if r in by_role]
        words = name if name != "Llama 3 8B" else "Llama 3 8B, 3072 tokens of text"
        words = words if name != "Llama 3 8B, twin" else "Llama 3 8B, 8192 tokens of text"
        style = {"fmt": palette.MARKERS[k], "color": palette.SERIES[k], "markersize": 5}
        axis.errorbar(x, y, bars, label=words, **style)
    axis.axhline(1.0, color=palette.GREY, linewidth=0.8)
    axis.set(title="squared gradient norms, predicted over measured", ylim=(0.5, 1.5))
    axis.set_xticks(range(len(MATRICES)), MATRICES)
    axis.legend(fontsize=7, loc="upper left", ncols=2)


def write_page() -> None:
    data = stored()
    PAGE.write_text(page(data), encoding="utf-8")
    picture(data).savefig(PICTURE, dpi=90)
