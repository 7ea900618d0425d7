"""The founding papers: their statements, their figures redrawn, and every theory validated.

Start with `analysis`.
"""
