"""What any composition of components does to moments, without knowing one of them.

`state` are the moments that travel and `classes` their resolution; `composition` says what a
component is and how components compose; `propagate` walks them forward and back, `trace` is what
it saw. `directions`, `realised` and `short_vectors` are what finite width adds.

Imports `model` and `formulas`. Start with `state`, then `composition`, then `propagate`.
"""
