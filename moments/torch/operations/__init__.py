"""Any module, operation by operation: its recorded pass is lowered to variables, which have laws.

`predict` is the entry. `variables` says what a recorded tensor can be and how its entries are
labelled; `lowering` makes variables of recorded operations; `laws` has their covariances and, as a
derivative of the same recursion, their gradients; `sampling` draws what no law covers.
"""

from .predict import ModulePrediction, predict

__all__ = ["ModulePrediction", "predict"]
