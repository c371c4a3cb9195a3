"""Side-by-side measurements: the same tiny model, the same clients, one core per server."""
