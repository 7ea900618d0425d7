"""Processors that a simulation or a module can run on."""

from __future__ import annotations

import torch


def accelerators() -> list[str]:
    """What torch can use beside the CPU, with its name."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [f"cuda:{number} ({torch.cuda.get_device_name(number)})" for number in range(count)]
    return found + ["mps"] * torch.backends.mps.is_available()
