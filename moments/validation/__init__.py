"""A fixed grid of whole models, simulated once, with which every theory is compared.

Nothing is fitted to it: the grid was fixed before any error was known, and no formula uses it.
"""
