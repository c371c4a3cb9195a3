"""Everything between a decoded request and a backend."""
