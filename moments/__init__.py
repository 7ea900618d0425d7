"""moments: closed-form signal propagation in transformers at initialisation.

Given an architecture, predict what every layer does to the signal and to its gradient.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> module that defines it; loaded on first use, so that `import moments` stays light.
_PUBLIC = {
    "Biases": "weights",
    "Comparison": "comparison",
    "ComponentLaws": "law",
    "Diagnosis": "diagnosis",
    "DomainError": "errors",
    "Embedding": "embedding",
    "Explanation": "explanation",
    "Head": "head",
    "Law": "law",
    "Measurement": "measurement",
    "MomentsError": "errors",
    "PatchEmbedding": "patches",
    "Plan": "solver.plan",
    "Prediction": "prediction",
    "RelativeBias": "positions",
    "Rotary": "positions",
    "Transformer": "transformer",
    "ValidityWarning": "errors",
    "Weights": "weights",
    "compare": "comparison",
    "compare_schemes": "scheme_table",
    "component": "registry",
    "components": "registry",
    "diagnose": "modules.diagnose",
    "explain": "explanation",
    "from_huggingface": "huggingface",
    "predict": "passes",
    "preset": "presets",
    "register_activation": "activations",
    "schemes": "scheme.registry",
    "simulate": "simulation.run",
    "solve": "solver.solve",
}

__all__ = [
    "Biases",
    "Comparison",
    "ComponentLaws",
    "Diagnosis",
    "DomainError",
    "Embedding",
    "Explanation",
    "Head",
    "Law",
    "Measurement",
    "MomentsError",
    "PatchEmbedding",
    "Plan",
    "Prediction",
    "RelativeBias",
    "Rotary",
    "Transformer",
    "ValidityWarning",
    "Weights",
    "__version__",
    "compare",
    "compare_schemes",
    "component",
    "components",
    "diagnose",
    "explain",
    "from_huggingface",
    "predict",
    "preset",
    "register_activation",
    "schemes",
    "simulate",
    "solve",
]

if TYPE_CHECKING:
    from .activations import register_activation
    from .comparison import Comparison, compare
    from .diagnosis import Diagnosis
    from .embedding import Embedding
    from .errors import DomainError, MomentsError, ValidityWarning
    from .explanation import Explanation, explain
    from .head import Head
    from .huggingface import from_huggingface
    from .law import ComponentLaws, Law
    from .measurement import Measurement
    from .modules.diagnose import diagnose
    from .passes import predict
    from .patches import PatchEmbedding
    from .positions import RelativeBias, Rotary
    from .prediction import Prediction
    from .presets import preset
    from .registry import component, components
    from .scheme.registry import schemes
    from .scheme_table import compare_schemes
    from .simulation.run import simulate
    from .solver.plan import Plan
    from .solver.solve import solve
    from .transformer import Transformer
    from .weights import Biases, Weights


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
        globals()[name] = value
        return value
    if name in ("analysis", "torch"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "analysis", "torch"})
