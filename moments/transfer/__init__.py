"""What each component does to a signal, and to a gradient on its way back.

`elementary` (linear maps, activations, dropout, scales), `normalization`, `gated`, `embedding`,
`images`, `attention/` and `head/`; `architecture` puts them together as a declaration says.

Imports `engine`. Start with `elementary`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """This folder is called, too: `moments.transfer(...)`."""

    def __call__(
        self,
        factory: Callable[[int], Any],
        axis: str = "width",
        sizes: Sequence[int] = (128, 256, 512),
        optimizer: Any = None,
    ) -> Any:
        """Whether learning rates found on small models hold on large ones, and what hinders them.

        Modules of two or more sizes are read, with the rates that their optimizers give every
        parameter, and their first steps predicted: nothing is trained. How what a step does goes
        with the size is an exponent, 0 where rates transfer.

        Args:
            factory: from a size to a module of that width or depth, or to (module, optimizer).
            axis: "width" or "depth".
            sizes: what the factory is called with, rising.
            optimizer: a function of the module (or of the module and the size) that makes its torch
                optimizer, or several (Muon beside Adam), with the real groups; or a name as in
                `Prediction.after`, all rates being one; None: the factory's, else Adam at one rate.

        Returns:
            A TransferReport: `passed`, `findings` (each with its mend), `table()`, `to_frame()`.

        Raises:
            DomainError: an argument out of range, an optimizer that is not known, or a module that
                is no decoder, encoder or classifier that can be read (the message says why).
        """
        package = sys.modules[self.__name__.partition(".")[0]]
        return package._transfer(factory, axis, sizes, optimizer)


sys.modules[__name__].__class__ = _Package
