"""Studies with `moments`: the founding papers' statements (`analysis`) and their figures, redrawn
(`figures`); the sharpness of the loss at initialisation (`sharpness`), and of real modules
(`sharpness_of_modules`).

Not part of the installed package: import it with the repository's root on the path.
"""
