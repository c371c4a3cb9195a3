"""Backends: each turns a model version into an ``Infer``; ``registry`` lists them."""
