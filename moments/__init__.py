"""moments: closed-form signal propagation in transformers at initialisation.

Given an architecture, predict what every layer does to the signal and to its gradient.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> module that defines it; loaded on first use, so that `import moments` stays light.
_PUBLIC = {
    "Biases": "model.weights",
    "Comparison": "show.comparison",
    "ComponentLaws": "formulas.law",
    "Diagnosis": "show.diagnosis",
    "DomainError": "errors",
    "Embedding": "model.embedding",
    "Explanation": "prediction.explanation",
    "FirstStep": "step.result",
    "Head": "model.head",
    "Law": "formulas.law",
    "Measurement": "prediction.measurement",
    "MomentsError": "errors",
    "PatchEmbedding": "model.patches",
    "Plan": "solver.plan",
    "Prediction": "prediction.result",
    "RelativeBias": "model.positions",
    "Rotary": "model.positions",
    "StepMeasurement": "step.measured",
    "Transformer": "model.transformer",
    "ValidityWarning": "errors",
    "Weights": "model.weights",
    "compare": "show.comparison",
    "compare_schemes": "show.scheme_table",
    "component": "formulas.registry",
    "components": "formulas.registry",
    "diagnose": "torch.diagnose",
    "explain": "prediction.explanation",
    "from_huggingface": "model.huggingface.config",
    "learning_rate": "step.search",
    "predict": "prediction.predict",
    "preset": "model.presets",
    "register_activation": "formulas.named_activations",
    "schemes": "scheme.registry",
    "simulate": "simulation.run",
    "solve": "scheme.plan",
}

# Packages that are public as wholes.
_PACKAGES = {"analysis": "papers.analysis", "figures": "papers.figures", "torch": "torch"}

__all__ = [
    "Biases",
    "Comparison",
    "ComponentLaws",
    "Diagnosis",
    "DomainError",
    "Embedding",
    "Explanation",
    "FirstStep",
    "Head",
    "Law",
    "Measurement",
    "MomentsError",
    "PatchEmbedding",
    "Plan",
    "Prediction",
    "RelativeBias",
    "Rotary",
    "StepMeasurement",
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
    "learning_rate",
    "predict",
    "preset",
    "register_activation",
    "schemes",
    "simulate",
    "solve",
]

if TYPE_CHECKING:
    from .errors import DomainError, MomentsError, ValidityWarning
    from .formulas.law import ComponentLaws, Law
    from .formulas.named_activations import register_activation
    from .formulas.registry import component, components
    from .model.embedding import Embedding
    from .model.head import Head
    from .model.huggingface.config import from_huggingface
    from .model.patches import PatchEmbedding
    from .model.positions import RelativeBias, Rotary
    from .model.presets import preset
    from .model.transformer import Transformer
    from .model.weights import Biases, Weights
    from .prediction.explanation import Explanation, explain
    from .prediction.measurement import Measurement
    from .prediction.predict import predict
    from .prediction.result import Prediction
    from .scheme.plan import solve
    from .scheme.registry import schemes
    from .show.comparison import Comparison, compare
    from .show.diagnosis import Diagnosis
    from .show.scheme_table import compare_schemes
    from .simulation.run import simulate
    from .solver.plan import Plan
    from .step.measured import StepMeasurement
    from .step.result import FirstStep
    from .step.search import learning_rate
    from .torch.diagnose import diagnose


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
        globals()[name] = value
        return value
    if name in _PACKAGES:
        return importlib.import_module(f".{_PACKAGES[name]}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
