"""What a user declares: an architecture, its weights, tables, positions and head.

`transformer` is the declaration, `huggingface/` reads it from a config, `presets` from a name.
Nothing here predicts.

Imports `formulas`. Start with `transformer`.
"""
