"""Small models for the demo, trained in seconds, and their data."""
