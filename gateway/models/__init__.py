"""Models and their versions: discovery, loading, version policy."""
