"""What a declaration means for the parameters of a real torch module, and back.

roles          which role every parameter plays
structure      where residual sums, branches and norms sit
scales         residual and norm scales as hooks
expectation    what a model says of every role
distributions  matrices of an exact variance
wrappers       what stands around a module
draft          names and sites of a module that no family knows
initialize, audit, fold, describe, snippet: what users call
"""
