"""Small models trained in seconds, for the demo: their data, and how they are trained."""
