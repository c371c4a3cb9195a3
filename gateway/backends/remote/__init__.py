"""Backends on remote servers; ``backend`` is common to all and uses ``gateway.upstream``."""
