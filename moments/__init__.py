"""moments: closed-form signal propagation in transformers at initialisation.

Given an architecture, predict what every layer does to the signal and to its gradient.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> module that defines it; loaded on first use, so that `import moments` stays light.
_PUBLIC = {
    "ComponentLaws": "law",
    "Comparison": "comparison",
    "DomainError": "errors",
    "Embedding": "embedding",
    "Law": "law",
    "Measurement": "measurement",
    "MomentsError": "errors",
    "Prediction": "prediction",
    "Transformer": "transformer",
    "ValidityWarning": "errors",
    "Weights": "weights",
    "compare": "comparison",
    "component": "registry",
    "components": "registry",
    "from_huggingface": "huggingface",
    "predict": "prediction",
    "preset": "presets",
    "schemes": "scheme.registry",
    "simulate": "simulation.run",
}

__all__ = [
    "Comparison",
    "ComponentLaws",
    "DomainError",
    "Embedding",
    "Law",
    "Measurement",
    "MomentsError",
    "Prediction",
    "Transformer",
    "ValidityWarning",
    "Weights",
    "__version__",
    "compare",
    "component",
    "components",
    "from_huggingface",
    "predict",
    "preset",
    "schemes",
    "simulate",
]

if TYPE_CHECKING:
    from .comparison import Comparison, compare
    from .embedding import Embedding
    from .errors import DomainError, MomentsError, ValidityWarning
    from .huggingface import from_huggingface
    from .law import ComponentLaws, Law
    from .measurement import Measurement
    from .prediction import Prediction, predict
    from .presets import preset
    from .registry import component, components
    from .scheme import schemes
    from .simulation.run import simulate
    from .transformer import Transformer
    from .weights import Weights


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
        globals()[name] = value
        return value
    if name == "torch":
        return importlib.import_module(".torch", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "torch"})
