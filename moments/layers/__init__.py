"""Components of a network: moments of signals, forward, and of gradients, backward.

`elementary` (linear maps, activations, dropout, scales), `normalization`, `gated`, `embedding`,
`images`, `attention/`, `experts/`, `recurrent/` and `head/`; `architecture` composes them from a
declaration.

Imports `engine`. Start with `elementary`.
"""
