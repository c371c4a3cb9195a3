"""``modelport compare``: formats and backends side by side."""
