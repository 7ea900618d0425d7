"""Every formula of the package, one file per kind of component."""
