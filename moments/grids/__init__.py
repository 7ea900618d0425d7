"""Grids of predictions: what may vary (`axes`), many configurations in one pass (`together`), what
a killed sweep leaves behind (`store`), the sweep itself (`run`) and what a user holds (`result`).

Start at `run.sweep`.
"""
