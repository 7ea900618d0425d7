"""What any composition of components does to moments, without knowing one of them.

`state` are the moments that travel and `classes` their resolution; `composition` says what a
component is, how components compose and how a signal passes them; `trace` is what a pass
saw; `layout` divides tokens into sequences and documents. `directions` and `fluctuation` are what
finite width adds, `response` how a number answers to small changes, `structure` how values that
differ in numbers alone are evaluated at once.

Imports `model` and `formulas`. Start with `state`, then `composition`, then `trace`.
"""
