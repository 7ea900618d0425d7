"""The papers' figures, redrawn: predictions as lines, stored simulations as points over them.

`draw(name, path)` draws one; `names()` lists them and `setup(name)` says what one shows.
"""

from .catalogue import names, setup
from .drawing import draw

__all__ = ["draw", "names", "setup"]
