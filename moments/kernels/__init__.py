"""Kernel operations resolved by token."""
