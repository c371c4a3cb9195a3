"""Command-line verbs of the gateway, one module each."""
