"""Every formula of the package, and what a formula is.

`law` is one formula: source, domain and status, from which come numpy, mpmath, sympy and LaTeX;
`algebra` its number systems, `checks` where numbers may lie and the checks of what users pass,
`symbols` its letters. `registry` finds a formula by its component's name; the other modules hold
them, one file per kind of component.

Imports nothing but the errors. Start with `linear` and `law`.
"""
