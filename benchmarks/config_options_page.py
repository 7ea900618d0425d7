"""The page docs/config-options.md, and what every changed entry changes in the declaration."""

from __future__ import annotations

from pathlib import Path

from config_options import (
    BOUNDS,
    MEASURED_ELSEWHERE,
    QUANTITIES,
    SEQ_LEN,
    STANDARD_ERRORS,
    WIDTH,
    WITHOUT_EFFECT,
    Compared,
    compare_kind,
    is_named,
    options,
    stored,
    write_readings,
)

from moments.model.huggingface import FAMILIES

PAGE = Path(__file__).parent.parent / "docs" / "config-options.md"

# Why a case is outside its bounds, where that is known: family, entry -> reason.
KNOWN: dict[tuple[str, str], str] = {
    **dict.fromkeys(
        ((kind, "pad_token_id") for kind in ("camembert", "roberta", "xlm-roberta")),
        "a text that has the padding token, and no mask that leaves it out: the module gives it no"
        " position either",
    ),
    ("distilbert", "sinusoidal_pos_embds"): "transformers 5 leaves the fixed table trainable",
    **dict.fromkeys(
        (("mt5", ""), ("mt5", "d_ff"), ("mt5", "initializer_factor")),
        "the encoder's gradients are low where a tied head does not scale its input, as"
        " [real modules](real-modules.md) has it",
    ),
    **dict.fromkeys(
        (("electra", "embedding_size"), ("opt", "word_embed_proj_dim")),
        "measured under names of the module's own, where a matrix follows narrow tables",
    ),
    ("phi", "qk_layernorm"): "gradients of these norms' biases are not predicted",
}

INTRODUCTION = f"""# Entries of configs at a second value

Every entry that a family's config reader reads is changed, one at a time, in a small module (2
layers, width {WIDTH}, 2 sequences of {SEQ_LEN} tokens, weights of variance 1/d). The module is
measured with and without the change, in the same draws of its weights; both configs are declared
by `moments.from_huggingface` and predicted on the same tokens.

    python benchmarks/config_options.py page

writes this page from predictions and from stored measurements. A case is outside where an error of
a stream's forward variance, correlation or gradient variance, of the change's effect on one of
these, or of the loss exceeds its bound by more than {STANDARD_ERRORS:g} standard errors: variance
{100 * BOUNDS["variance"]:g} %, correlation {BOUNDS["correlation"]:g}, gradient variance
{100 * BOUNDS["grad_variance"]:g} %, loss {100 * BOUNDS["loss"]:g} %. It is outside, too, where a
change moves the declaration and not one draw of the module, or the module and not the declaration,
and where the parameters predicted are not those that the module has.
"""


def write_page() -> None:
    """Predict every stored case; write the page and the readings."""
    rows = {kind: list(compare_kind(kind)) for kind in sorted(FAMILIES)}
    write_readings()
    every = [row for found in rows.values() for row in found]
    outside = [row for row in every if row.failures]
    parts = [
        INTRODUCTION,
        f"{len(every) - len(outside)} of {len(every)} cases are inside.\n",
        "| module | cases | draws | largest error of "
        + " | ".join((*QUANTITIES, "loss"))
        + " | named, not modelled |\n| --- | --- | --- |"
        + " --- |" * (len(BOUNDS) + 1),
        *(_line(kind, found) for kind, found in rows.items()),
        "\nErrors are in percent (of correlations in hundredths), each with its standard error; of"
        " a quantity the one that comes nearest to its bound or is farthest outside.\n",
        "## Outside\n",
        *(_outside(row) for row in outside),
        "\n## Entries that no case changes\n",
        *(f"* `{name}`: {reason}." for name, reason in sorted(WITHOUT_EFFECT.items())),
        f"* `{'`, `'.join(sorted(MEASURED_ELSEWHERE))}`: measured at other sizes in"
        " [real modules](real-modules.md).",
    ]
    PAGE.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")


def _line(kind: str, found: list[Compared]) -> str:
    cells = []
    for name in BOUNDS:
        errors = [e for row in found for e in row.errors if e.quantity == name]
        worst = max(errors, key=lambda e: e.outside, default=None)
        cells.append(
            "" if worst is None else f"{100 * worst.value:+.1f} ± {100 * worst.stderr:.1f}"
        )
    draws = sorted({record["seeds"] for record in stored(kind).values()})
    count = f"{draws[0]}" if len(draws) == 1 else f"{draws[0]} to {draws[-1]}"
    named = sorted(
        {e for e, tried in options(kind).items() if any(is_named(kind, e, t) for t in tried)}
    )
    words = ", ".join(f"`{name}`" for name in named)
    return f"| {kind} | {len(found)} | {count} | " + " | ".join(cells) + f" | {words} |"


def _outside(row: Compared) -> str:
    reason = KNOWN.get((row.case.kind, row.entry), "not known why")
    return f"* {row.case.kind} `{row.case.changed}`: {'; '.join(row.failures)}: {reason}."
