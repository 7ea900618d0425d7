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
    "Absent": "model.mixers",
    "AltUp": "model.streams",
    "Biases": "model.weights",
    "Comparison": "show.comparison",
    "ComponentLaws": "formulas.law",
    "DomainError": "errors",
    "Embedding": "model.embedding",
    "Experts": "model.experts",
    "Explanation": "prediction.explanation",
    "Finding": "show.findings",
    "FirstStep": "step.result",
    "GatedDeltaNet": "model.mixers",
    "Head": "model.head",
    "HyperConnections": "model.streams",
    "Values": "model.values",
    "Law": "formulas.law",
    "LinearAttention": "model.mixers",
    "LearningRate": "step.search",
    "Mamba": "model.mixers",
    "Mamba2": "model.mixers",
    "Measurement": "prediction.measurement",
    "MomentsError": "errors",
    "LatentAttention": "model.mixers",
    "Laurel": "model.streams",
    "PerLayerEmbedding": "model.per_layer",
    "FeedForward": "model.mixers",
    "ParallelMixer": "model.mixers",
    "LayerAttention": "model.mixers",
    "PatchEmbedding": "model.patches",
    "Plan": "solver.plan",
    "Prediction": "prediction.result",
    "RGLRU": "model.mixers",
    "RelativeBias": "model.positions",
    "Report": "show.findings",
    "Rotary": "model.positions",
    "ShortConvolution": "model.mixers",
    "SoundEmbedding": "model.patches",
    "Sharpness": "step.sharpness",
    "StepMeasurement": "step.measured",
    "Sweep": "grids.result",
    "TransferReport": "step.scaling",
    "Transformer": "model.transformer",
    "ValidityWarning": "errors",
    "Weights": "model.weights",
    "block": "model.law_block",
    "compare": "show.comparison",
    "compare_schemes": "show.scheme_table",
    "component": "formulas.registry",
    "components": "formulas.registry",
    "diagnose": "torch.diagnose",
    "expect": "torch.expect",
    "explain": "prediction.explanation",
    "explore": "show.explorer",
    "learning_rate": "step.search",
    "predict": "prediction.predict",
    "preset": "model.presets",
    "register_activation": "formulas.activation",
    "report": "show.page",
    "schemes": "scheme.registry",
    "simulate": "simulation.run",
    "solve": "scheme.plan",
    "sweep": "grids.run",
    "transfer": "torch.transfer",
}

# Modules and packages that are public as wholes.
_PACKAGES = {"laws": "engine.laws", "torch": "torch"}

__all__ = [
    "RGLRU",
    "Absent",
    "AltUp",
    "Biases",
    "Comparison",
    "ComponentLaws",
    "DomainError",
    "Embedding",
    "Experts",
    "Explanation",
    "FeedForward",
    "Finding",
    "FirstStep",
    "GatedDeltaNet",
    "Head",
    "HyperConnections",
    "LatentAttention",
    "Laurel",
    "Law",
    "LayerAttention",
    "LearningRate",
    "LinearAttention",
    "Mamba",
    "Mamba2",
    "Measurement",
    "MomentsError",
    "ParallelMixer",
    "PatchEmbedding",
    "PerLayerEmbedding",
    "Plan",
    "Prediction",
    "RelativeBias",
    "Report",
    "Rotary",
    "Sharpness",
    "ShortConvolution",
    "SoundEmbedding",
    "StepMeasurement",
    "Sweep",
    "TransferReport",
    "Transformer",
    "ValidityWarning",
    "Values",
    "Weights",
    "__version__",
    "block",
    "check",
    "compare",
    "compare_schemes",
    "component",
    "components",
    "diagnose",
    "expect",
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
    "transfer",
]

if TYPE_CHECKING:
    from .errors import DomainError, MomentsError, ValidityWarning
    from .formulas.activation import register_activation
    from .formulas.law import ComponentLaws, Law
    from .formulas.registry import component, components
    from .model.embedding import Embedding
    from .model.experts import Experts
    from .model.head import Head
    from .model.law_block import block
    from .model.mixers import (
        RGLRU,
        Absent,
        GatedDeltaNet,
        LatentAttention,
        LayerAttention,
        LinearAttention,
        Mamba,
        Mamba2,
        ParallelMixer,
        ShortConvolution,
    )
    from .model.patches import PatchEmbedding, SoundEmbedding
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
    from .show.explorer import explore
    from .show.findings import Finding, Report
    from .show.page import report
    from .show.scheme_table import compare_schemes
    from .simulation.run import simulate
    from .solver.plan import Plan
    from .step.measured import StepMeasurement
    from .step.result import FirstStep
    from .step.scaling import TransferReport
    from .step.search import LearningRate, learning_rate
    from .step.sharpness import Sharpness
    from .torch.diagnose import diagnose
    from .torch.expect import expect
    from .torch.transfer import transfer


def check(
    subject: Any,
    batch: Any = None,
    *,
    plan: Any = None,
    scheme: str | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    measured: Mapping[Any, Any] | None = None,
) -> Report:
    """Whether a model is in order at initialisation, before it is trained.

    A module is followed operation by operation through one pass of a few tokens, measured in one
    pass forward and one back, and run twice more on few tokens, for what is random in it (up to
    five times where its input and loss are not given). Its weights are read,
    the published scheme or framework default that they seem to be of is recognised, and every
    number is compared with what those weights, sums and norms give; a layer that is unlike the
    others is named without any scheme. A declaration or a config is judged by its
    predictions alone, and the report says that nothing was measured.

    Args:
        subject: an nn.Module, a function that makes one (or a module and its batch), without
            arguments or of a seed, or a checkpoint's folder or file; or a Transformer, a plan, a
            preset's name, or a Hugging Face config (a path to config.json or its folder, a dict or
            an object).
        batch: what the module reads, as in `moments.torch.measure`; None: random input, where the
            module says what it takes. Of a text the first 32 tokens of two sequences are read.
        plan: what the initialisation is meant to be: a plan of `moments.solve`, a Transformer, or a
            scheme's name. None: what the module's config promises, else what its weights are
            recognised as.
        scheme: the same by a scheme's name.
        loss: of the module's output and the batch, as in `moments.torch.measure`; None: its own, or
            the cross-entropy of the next token where it gives logits alone.
        measured: the stream's variance as it was seen elsewhere, by layer ({24: 20.0}), or the
            arguments of `Prediction.expects`: what is not expected is a finding, with what would
            give it.

    Returns:
        A Report: `healthy`, `findings`, `causes()`, `assert_healthy()`, `str`, `table()`,
        `to_frame()`, `to_html()`, `plot()`.

    Raises:
        DomainError: an argument out of range.
        MomentsError: a module that cannot be read or run.
    """
    from .errors import DomainError, Undeclared
    from .show.health import call_factory, check_declared, declared, is_factory

    if plan is not None and scheme is not None:
        raise DomainError("plan and scheme both say what is meant: pass one of them")
    meant = scheme if plan is None else plan
    if is_factory(subject):
        from .torch.factory import constructed

        subject, given = constructed(subject)
    else:
        subject, given = call_factory(subject)
    batch = given if batch is None else batch
    try:
        model = declared(subject)
    except Undeclared as refusal:
        if meant is not None or batch is not None or loss is not None or measured is not None:
            raise
        from .model.huggingface.config import read_config
        from .torch.from_config import checked

        return checked(read_config(subject), refusal)
    if model is not None:
        report = check_declared(*model, batch=batch, scheme=meant, loss=loss)
    else:
        from .torch.check import check_module

        report = check_module(subject, batch, scheme=meant, loss=loss)
    return report if measured is None else report.with_measured(measured)


def from_huggingface(config: Any, *, seq_len: int | None = None) -> Transformer:
    """The architecture and initialisation that a Hugging Face config describes.

    Families with a reader of their own need neither torch nor transformers. A config of another
    type is read from the module that transformers builds of it, by what that computes; its
    variances are those that the class's own `_init_weights` draws.

    Args:
        config: a path to config.json (or its folder), a dict, or a PretrainedConfig.
        seq_len: tokens per sequence; None: the most the config allows.

    Returns:
        A Transformer with the embedding and the head of the family's own training task; of an
        encoder and a decoder the decoder, with the other as its `encoder`.

    Raises:
        DomainError: an unreadable file, an unknown model type, a missing or bad entry, or an entry
            that switches on a feature that no Transformer can express, which it names.
        MomentsError: the type has no reader, and torch or transformers is not installed.

    Warns:
        ValidityWarning: names each entry of the config that is not modelled.
    """
    from .model.huggingface.config import from_huggingface as read
    from .model.huggingface.config import has_reader, named, read_config

    entries = read_config(config)
    if has_reader(entries.get("model_type")):
        return read(entries, seq_len=seq_len)
    import warnings
    from importlib.util import find_spec

    from .errors import MomentsError, ValidityWarning

    if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
        raise MomentsError(
            f"model_type = {entries['model_type']!r} has no reader of its own and is read from its "
            f"module, for which {' and '.join(missing)} must be installed: "
            'pip install "transformer-moments[hf]"'
        )
    from .torch.from_config import from_config

    model, notes = from_config(entries, seq_len)
    for note in notes:
        warnings.warn(note, ValidityWarning, stacklevel=2)
    return named(model, entries)


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
