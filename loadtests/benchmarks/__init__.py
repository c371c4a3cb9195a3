"""modelport measured against figures of its own: what it adds, keeps, bears, and how it starts."""
