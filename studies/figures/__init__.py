"""The papers' figures, redrawn: predictions as lines, stored simulations as points over them.

`draw(name, path)` draws one; `names()` lists them and `setup(name)` says what one shows.
"""

from .drawing import draw, names, setup

__all__ = ["draw", "names", "setup"]
