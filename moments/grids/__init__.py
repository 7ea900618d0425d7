"""Grids of predictions: what may vary (`axes`), many configurations in one pass (`together`), what
a killed sweep leaves behind (`store`), the sweep itself (`run`), what a user holds (`result`) and
how it is drawn (`picture`).

Start at `run.sweep`.
"""
