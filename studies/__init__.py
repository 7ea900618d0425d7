"""Studies with `moments`: statements of the founding papers (`formulas`, `analysis`), and their
figures redrawn (`figures`).

Not part of the installed package: import it with the repository's root on the path.
"""
