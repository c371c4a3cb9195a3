"""Side-by-side measurements: the same model files, the same clients, one core per server."""
