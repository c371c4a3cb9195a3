"""The shift of recorded inputs and outputs from a baseline."""
