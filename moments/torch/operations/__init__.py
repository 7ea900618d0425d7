"""Prediction of any module by its operations: a recorded pass is lowered to variables with laws.

Start with `predict`. `variables` defines variables and the labels of recorded tensors; `lowering`
makes variables of recorded operations; `laws` computes covariances and, as derivatives of the same
recursion, gradients; `sampling` draws variables without a law.
"""

from .predict import ModulePrediction, predict

__all__ = ["ModulePrediction", "predict"]
