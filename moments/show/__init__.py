"""Tables, pictures and verdicts in words, for a prediction alone or next to a measurement.

Imports `prediction`. Start with `comparison`.
"""
