"""Batch prediction: a file of rows through a model, and its answers in another file."""
