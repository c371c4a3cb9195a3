"""Servers elsewhere: ``backend.py`` is what they have in common, over ``gateway.upstream``."""
