"""Slips of muP in seven styles of code, and what `moments.transfer` says of each.

python benchmarks/transfer.py    # correct recipes, and slips planted one at a time
"""

from __future__ import annotations

import sys
from pathlib import Path

import moments

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from scaled_modules import SLIPS, STYLES, recipe

SIZES = (64, 128, 256)


def main() -> None:
    for style in STYLES:
        report = moments.transfer(recipe(style), sizes=SIZES)
        print(f"{style}, correct: {'passed' if report.passed else report.table()}", flush=True)
    named = 0
    for style, slip in SLIPS:
        assert slip is not None
        findings = moments.transfer(recipe(style, slip), sizes=SIZES).findings
        right = bool(findings) and all(slip[1] in finding.parameters for finding in findings)
        named += right
        said = "; ".join(map(str, findings)) or "nothing"
        print(f"{style}, {slip}: {'' if right else 'NOT NAMED: '}{said}", flush=True)
    print(f"{named} of {len(SLIPS)} named, and nothing else")


if __name__ == "__main__":
    main()
