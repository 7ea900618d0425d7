"""Real torch modules: measure, initialise, audit, fold and describe them.

`dataflow/` reads any module from one pass: the roles of its parameters, its residual branches and
norms (types in `roles`); `anatomy` caches readings. `operations/` predicts modules that no
Transformer describes. `scales` adds residual and norm scales as hooks, `expectation` computes what
a model says of every role, `running` runs modules.

The only folder besides `simulation` that imports torch; nothing but the commands imports it. Start
with `measure`, then `audit`.
"""

from __future__ import annotations

from ..errors import optional

with optional("torch", "torch"):
    from .agreement import same_initialization
    from .anatomy import hook_points
    from .describe import describe, weight_statistics
    from .diagnose import diagnose
    from .fold import fold
    from .initialize import Initialization, attach, initialize
    from .measure import measure
    from .operations import ModulePrediction, predict
    from .roles import HookPoint
    from .scales import AppliedScales
    from .sharpness import measure_sharpness
    from .step import measure_step
    from .weight_findings import audit

__all__ = [
    "AppliedScales",
    "HookPoint",
    "Initialization",
    "ModulePrediction",
    "attach",
    "audit",
    "describe",
    "diagnose",
    "fold",
    "hook_points",
    "initialize",
    "measure",
    "measure_sharpness",
    "measure_step",
    "predict",
    "same_initialization",
    "weight_statistics",
]
