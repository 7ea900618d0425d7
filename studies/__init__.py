"""Studies with `moments`: the founding papers' statements (`analysis`) and their figures, redrawn
(`figures`).

Not part of the installed package: import it with the repository's root on the path.
"""
