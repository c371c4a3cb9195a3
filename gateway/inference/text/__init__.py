"""Texts in, answers out: tokenizing before a model's tensors, and the task's answers after them."""
