"""The page docs/board.md: what the board of what ships found, summary first."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/board.md"
JUDGED = ROOT / "benchmarks/data/board_judged.json"
"""What was made of every finding by hand: type -> kind -> [verdict, why]."""

VERDICTS = {
    "true": "a fault of the type as its library builds it",
    "by design": "as the report says, and meant so by its authors, or a part that this task leaves",
    "size": "so at the size built here, and not at the type's own",
    "false": "a false alarm",
}

GROUPS = (
    ("a mixture of experts", r"mixture of experts"),
    ("a recurrence, or no softmax attention at all", r"recurrence|no attention beside"),
    ("something acts between attention's heads and its output", r"acts between an attention"),
    ("latent or several projections", r"before a block's matrices is no norm|no single matrix"),
    ("norms behind a block's output alone, or other than in all layers", r"norms "),
    ("layers that share their weights, or differ", r"share their weights|differs between|layers t"),
    ("several streams", r"streams"),
    ("a feed-forward block of another kind", r"feed-forward block|activation"),
    ("it does not run on random input of the usual kinds", r"could not be run|does not run|batch "),
)
"""Why types are refused, in the order in which a reason is looked for."""


def judged() -> dict[str, dict[str, list[str]]]:
    return json.loads(JUDGED.read_text(encoding="utf-8"))


def reads(rows: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {kind: found for kind, found in rows.items() if "read by" in found}


def findings(rows: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Of every type the findings, those of one kind as one."""
    told = []
    for kind, found in sorted(rows.items()):
        seen: dict[str, dict[str, Any]] = {}
        for finding in found.get("findings", ()):
            seen.setdefault(finding["kind"], finding)
        told += [(kind, finding) for finding in seen.values()]
    return told


def group(reason: str) -> str:
    """Which of the common reasons a refusal has."""
    return next(
        (words for words, pattern in GROUPS if re.search(pattern, reason)), "something else"
    )


def spread(rows: dict[str, Any], quantity: str) -> np.ndarray:
    """|log(predicted / measured)| at the worst point of every read type."""
    ratios = [found["errors"].get(quantity, {}).get("ratio") for found in reads(rows).values()]
    return np.abs(np.log([ratio for ratio in ratios if ratio]))


def _summary(data: dict[str, Any]) -> list[str]:
    rows, versions = data["rows"], data["versions"]
    read = reads(rows)
    by = Counter(found["read by"] for found in read.values())
    state = Counter(
        next((s for s in ("not built", "broken", "refused") if s in found), "read")
        for found in rows.values()
    )
    told, verdicts = findings(rows), judged()
    counts = Counter(verdicts[kind][finding["kind"]][0] for kind, finding in told)
    lines = [
        "# What ships: every model type of transformers, checked",
        "",
        f"transformers {versions['transformers']}, torch {versions['torch']}. Every type for which "
        "an auto class names a module is built from its own config class, shrunk by rules on the "
        "names of entries (2 layers, width 256, 4 heads, 128 tokens), described, predicted, "
        "measured on random input and checked, each in a process of its own. Nothing in the run "
        "knows a model by name.",
        "",
        "    nice python benchmarks/board.py run     # continues where it stopped",
        "    python benchmarks/board.py page         # this page, from benchmarks/data/board.json",
        "",
        "| | types |",
        "| --- | ---: |",
        f"| named by an auto class | {data['types']} |",
        f"| tried so far | {len(rows)} |",
        f"| built | {len(rows) - state['not built']} |",
        f"| read by a family's reader | {by['family']} |",
        f"| read by dataflow, without one | {by['dataflow']} |",
        f"| refused, with the reason | {state['refused']} |",
        f"| ended by a limit or an error | {state['broken']} |",
        f"| not built by transformers at this size | {state['not built']} |",
        "",
        f"Findings: {len(told)}, one of a kind and type each. Looked at by hand:",
        "",
        "| verdict | findings | what it means |",
        "| --- | ---: | --- |",
        *(f"| {name} | {counts[name]} | {words} |" for name, words in VERDICTS.items()),
        "",
        "Predicted over measured at the worst point of the stream, one draw of each type read, "
        "the entries that were drawn given:",
        "",
        "| quantity | types | median error | 90 % below | worst |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, words in (
        ("variance", "variance"),
        ("grad_variance", "gradient variance"),
        ("loss", "loss"),
    ):
        errors = spread(rows, name)
        percent = [100 * np.expm1(np.quantile(errors, q)) for q in (0.5, 0.9, 1.0)]
        shown = " | ".join(f"{p:.2g} %" if p < 1e4 else "beyond" for p in percent)
        lines.append(f"| {words} | {len(errors)} | {shown} |")
    return lines


def _reasons(rows: dict[str, Any]) -> list[str]:
    refused = {kind: found["refused"] for kind, found in rows.items() if "refused" in found}
    grouped: dict[str, list[str]] = {}
    for kind, reason in sorted(refused.items()):
        grouped.setdefault(group(reason), []).append(kind)
    lines = [
        "",
        "## Why types are refused",
        "",
        "| reason | types | such as |",
        "| --- | ---: | --- |",
    ]
    for words, kinds in sorted(grouped.items(), key=lambda pair: -len(pair[1])):
        lines.append(f"| {words} | {len(kinds)} | {', '.join(kinds[:6])} |")
    return lines


def _findings(rows: dict[str, Any]) -> list[str]:
    verdicts = judged()
    lines = ["", "## Findings", "", "| type | finding | verdict |", "| --- | --- | --- |"]
    for kind, finding in findings(rows):
        verdict, why = verdicts[kind][finding["kind"]]
        names = ", ".join(finding["parameters"][:2]).replace("*", r"\*")
        said = finding["reason"].replace("|", "\\|").replace("*", r"\*")
        where = f" ({names})" if names and names not in said else ""
        lines.append(f"| {kind} | {finding['kind']}: {said}{where} | {verdict}: {why} |")
    drawn = {
        kind: [words for words in found.get("redrawn", ()) if "not run again" not in words]
        for kind, found in sorted(rows.items())
    }
    lines += [
        "",
        "## Declared and never applied",
        "",
        "The module's own initialiser, run once more part by part, later words over earlier ones, "
        "against what it was built with. transformers draws a tensor once, whoever comes first: of "
        "a tied table the head's own draw is declared and never applied.",
        "",
        "| type | tensor, and its variance if the last word counted |",
        "| --- | --- |",
        *(f"| {k} | {', '.join(w).replace('*', chr(92) + '*')} |" for k, w in drawn.items() if w),
    ]
    return lines


def _table(rows: dict[str, Any]) -> list[str]:
    lines = [
        "",
        "## All types",
        "",
        "Ratios are predicted over measured at the worst point of the stream.",
        "",
        "| type | module | read | variance | gradient | loss | findings |",
        "| --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for kind, found in sorted(rows.items()):
        told = ", ".join(sorted({f["kind"] for f in found.get("findings", ())}))
        errors = found.get("errors", {})
        ratios = [
            f"{errors[name]['ratio']:.3g}" if errors.get(name, {}).get("ratio") else ""
            for name in ("variance", "grad_variance", "loss")
        ]
        read = found.get("read by", "")
        for state in ("not built", "broken", "refused"):
            if state in found:
                said = found[state].replace("|", "\\|").replace("*", r"\*").replace("<", "&lt;")
                read = f"{state}: {said[:160]}{'...' if len(said) > 160 else ''}"
        lines.append(f"| {kind} | {found['module']} | {read} | {' | '.join(ratios)} | {told} |")
    return lines


def page(data: dict[str, Any]) -> str:
    rows = data["rows"]
    lines = [*_summary(data), *_reasons(rows), *_findings(rows), *_table(rows)]
    return "\n".join(lines) + "\n"
