"""Every dialect on every backend on the demo models, as a table: ``make matrix``."""
