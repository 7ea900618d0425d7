"""Colours of all pictures: those of Okabe and Ito (2008, "Color Universal Design"), which people
with any common colour vision deficiency can tell apart, without yellow, which is invisible as a
thin line on white. Lines of one panel also differ in their dashes, for grey prints.
"""

from __future__ import annotations

BLUE, VERMILION, GREEN = "#0072b2", "#d55e00", "#009e73"
PURPLE, ORANGE, SKY, BLACK = "#cc79a7", "#e69f00", "#56b4e9", "#222222"

SIGNAL, GRADIENT, MEASURED, FOUND = BLUE, VERMILION, BLACK, GREEN
OUTSIDE = PURPLE
"""Rings around points outside their band."""

GREY, PALE, SOFT = "#767676", "#d9d9d9", "#444444"
SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (1, 1)), (0, (9, 3)), "-")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SEQUENTIAL = "cividis"
"""Colour map of one quantity over a plane."""
