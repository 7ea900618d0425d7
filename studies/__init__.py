"""Studies of the founding papers with `moments`: their statements (`analysis`) and their figures,
redrawn (`figures`).

Not part of the installed package: import it with the repository's root on the path.
"""
