"""`predict`, what it returns, and what a measurement of the same looks like.

`predict` declares and runs a `stack`, `gate` lets nothing out that is not finite, `result` is the
`Prediction`; `explanation` takes one layer apart, law by law.

Imports `noise` and all below. Start with `predict`.
"""
