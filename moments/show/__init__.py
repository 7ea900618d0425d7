"""Tables, pictures and verdicts in words, of one prediction or beside a measurement.

Imports `prediction`. Start with `comparison`.
"""
