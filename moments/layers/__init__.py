"""What each component does to a signal, and to a gradient on its way back.

`elementary` (linear maps, activations, dropout, scales), `normalization`, `gated`, `embedding`,
`images`, `attention/` and `head/`; `architecture` puts them together as a declaration says.

Imports `engine`. Start with `elementary`.
"""
