"""The official ``tensorflow-serving-api`` stubs against a real gateway."""
