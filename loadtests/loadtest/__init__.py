"""``modelport loadtest``: one load on one model server, and its report."""
