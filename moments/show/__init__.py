"""Tables, pictures and verdicts in words, of one prediction or next to a measurement.

Imports `prediction`. Start with `comparison`.
"""
