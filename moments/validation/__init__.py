"""A fixed grid of whole models, simulated once, against which every theory is held.

Nothing is fitted to it: the grid was fixed before any error was looked at, and no formula reads its
data.
"""
