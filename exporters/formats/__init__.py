"""Export formats: how each is written and opened; ``registry`` lists them."""
