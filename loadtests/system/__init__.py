"""The machine of a load test: processes, folders, environments, hardware."""
