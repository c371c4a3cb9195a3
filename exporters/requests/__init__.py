"""Requests for a model: random inputs, sample files, and warm-up requests of other servers."""
