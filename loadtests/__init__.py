"""Load tests, comparisons and release gates for model servers, over the wire only."""
