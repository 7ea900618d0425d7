"""What any composition of components does to moments, without knowing one of them.

`state` are the moments that travel and `classes` their resolution; `composition` says what a
component is, how components compose and how a signal passes them; `trace` is what a pass
saw. `directions`, `fluctuation` and `short_vectors` are what finite width adds.

Imports `model` and `formulas`. Start with `state`, then `composition`, then `trace`.
"""
