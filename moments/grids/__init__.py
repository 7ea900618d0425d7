"""Grids of predictions: what may vary (`axes`), many configurations in one pass (`together`), the
file of results (`store`), the sweep itself (`run`), its `result` and plots of it (`picture`).

Start at `run.sweep`.
"""
