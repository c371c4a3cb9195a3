"""Command-line verbs of the exporters, one module each."""
