"""The metrics port, for operators."""
