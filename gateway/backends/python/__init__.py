"""Models in Python: each instance is a process with an interpreter of its own."""
