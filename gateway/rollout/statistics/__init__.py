"""The statistics of rollouts: counts, sequential tests, and the decision, a pure function."""
