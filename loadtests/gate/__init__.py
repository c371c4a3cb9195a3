"""``modelport gate``: a statistical release decision."""
