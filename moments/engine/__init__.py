"""Propagation of moments through any composition of components, independent of their kinds.

`state` defines the moments and `classes` their resolution; `composition` components and both
passes; `trace` the records of the passes; `layout` sequences and documents. `directions` and
`fluctuation` add finite-width corrections, `response` the adjoints of components, `structure`
the joint evaluation of declarations that differ in numbers only.

Imports `model` and `formulas`. Start with `state`, then `composition`, then `trace`.
"""
