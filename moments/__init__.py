"""moments: closed-form signal propagation in transformers at initialisation.

Given an architecture, predict what every layer does to the signal and to its gradient.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> module that defines it; loaded on first use, so that `import moments` stays light.
_PUBLIC = {
    "Biases": "model.weights",
    "CheckReport": "show.health",
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
    "Sweep": "grids.result",
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
    "explore": "show.explorer_widgets",
    "from_huggingface": "model.huggingface.config",
    "learning_rate": "step.search",
    "predict": "prediction.predict",
    "preset": "model.presets",
    "register_activation": "formulas.activation",
    "report": "show.page",
    "schemes": "scheme.registry",
    "simulate": "simulation.run",
    "solve": "scheme.plan",
    "sweep": "grids.run",
}

# Packages that are public as wholes.
_PACKAGES = {"analysis": "papers.analysis", "figures": "papers.figures", "torch": "torch"}

__all__ = [
    "Biases",
    "CheckReport",
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
    "Sweep",
    "Transformer",
    "ValidityWarning",
    "Weights",
    "__version__",
    "check",
    "compare",
    "compare_schemes",
    "component",
    "components",
    "diagnose",
    "explain",
    "explore",
    "from_huggingface",
    "learning_rate",
    "predict",
    "preset",
    "register_activation",
    "report",
    "schemes",
    "simulate",
    "solve",
    "sweep",
]

if TYPE_CHECKING:
    from .errors import DomainError, MomentsError, ValidityWarning
    from .formulas.activation import register_activation
    from .formulas.law import ComponentLaws, Law
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
    from .show.explorer_widgets import explore
    from .show.health import CheckReport
    from .show.page import report
    from .show.scheme_table import compare_schemes
    from .simulation.run import simulate
    from .solver.plan import Plan
    from .step.measured import StepMeasurement
    from .step.result import FirstStep
    from .step.search import learning_rate
    from .torch.diagnose import diagnose


def check(
    module_or_model_or_config: Any,
    batch: Any = None,
    *,
    scheme: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    measured: Mapping[Any, Any] | None = None,
) -> CheckReport:
    """Whether a model is in order at initialisation, before it is trained.

    A module is measured in one pass forward and one back, its weights are read, the published
    scheme or framework default that they seem to be of is recognised, and every number is held
    against what those weights, sums and norms give. A declaration or a config is judged by its
    predictions alone, and the report says that nothing was measured.

    Args:
        module_or_model_or_config: an nn.Module or a checkpoint's path; or a Transformer, a plan, a
            preset's name, or a Hugging Face config (a path to config.json, a dict or an object).
        batch: what the module reads, as in `moments.torch.measure`; None: random input, where the
            module says what it takes. Of a text the first 32 tokens of two sequences are read.
        scheme: what the initialisation is meant to be: a scheme's name, a Transformer or a plan.
            None: what the module's config promises, else what its weights are recognised as.
        loss: of the module's output and the batch, as in `moments.torch.measure`; None: its own, or
            the cross-entropy of the next token where it gives logits alone.
        measured: the stream's variance as it was seen elsewhere, by layer ({24: 20.0}), or the
            arguments of `Prediction.expects`: what is not expected is a finding, with what would
            give it.

    Returns:
        A CheckReport: `healthy`, `findings`, `assert_healthy()`, `str`, `to_frame()`, `to_html()`,
        `plot()`.

    Raises:
        DomainError: an argument out of range.
        MomentsError: a module that cannot be read or run.
    """
    from .show.health import check_declared, declared

    model = declared(module_or_model_or_config)
    if model is not None:
        report = check_declared(*model, batch=batch, scheme=scheme, loss=loss)
    else:
        from .torch.check import check_module

        report = check_module(module_or_model_or_config, batch, scheme=scheme, loss=loss)
    return report if measured is None else report.with_measured(measured)


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
