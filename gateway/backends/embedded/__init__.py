"""Runtimes inside this process: ``runtime.py`` is what they have in common."""
