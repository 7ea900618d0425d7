"""`predict`, its result, and measurements of the same quantities.

`predict` declares and runs a `stack`, `gate` checks its numbers, `result` defines `Prediction`;
`explanation` lists the laws of one layer.

Imports `noise` and all below. Start with `predict`.
"""
