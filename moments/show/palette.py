"""The colours of every picture: those of Okabe and Ito (2008, "Color Universal Design"), which
people with any of the common colour vision deficiencies tell apart, without yellow, of which a thin
line cannot be seen on white. Lines that share a panel differ in their dashes too, for a grey print.
"""

from __future__ import annotations

BLUE, VERMILION, GREEN = "#0072b2", "#d55e00", "#009e73"
PURPLE, ORANGE, SKY, BLACK = "#cc79a7", "#e69f00", "#56b4e9", "#222222"

SIGNAL, GRADIENT, MEASURED, FOUND = BLUE, VERMILION, BLACK, GREEN
OUTSIDE = PURPLE
"""Rings around points out of their band."""

GREY, PALE, SOFT = "#767676", "#d9d9d9", "#444444"
SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (1, 1)), (0, (9, 3)), "-")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SEQUENTIAL = "cividis"
"""Colour map of one quantity over a plane."""
