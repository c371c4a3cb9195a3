"""Figures of exports: whole commands, and lowered models beside other ways to TensorFlow."""
