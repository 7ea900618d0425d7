"""Any module, read from one forward pass."""

from __future__ import annotations

from .reading import Reading, read

__all__ = ["Reading", "read"]
