"""Graphs of other models of the repository: Triton's ensembles, and ``pipeline.toml``."""
