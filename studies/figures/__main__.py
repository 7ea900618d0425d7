"""Redraws the papers' figures from predictions, with stored simulated points over them.

python -m studies.figures [NAME ...] [--list] [--format pdf] [--folder pictures]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from . import draw, names, setup


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.figures",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; left out: all")
    parser.add_argument("--list", action="store_true", help="names and titles alone")
    parser.add_argument("--folder", type=Path, default=Path("figures"), help="of the pictures")
    parser.add_argument("--format", choices=("png", "svg", "pdf"), default="png")
    given = parser.parse_args(arguments)
    for name in given.names or names():
        title = setup(name).title
        if given.list:
            print(f"{name:9} {title}")
            continue
        given.folder.mkdir(parents=True, exist_ok=True)
        path = given.folder / f"{name}.{given.format}"
        draw(name, path)
        print(path)


if __name__ == "__main__":
    main()
