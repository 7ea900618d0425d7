"""Any module, read from one forward pass."""

from __future__ import annotations

from .reading import ModuleReading, read

__all__ = ["ModuleReading", "read"]
