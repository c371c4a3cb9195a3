"""The gate on thousands of simulated and on some real releases: how often it is wrong."""
