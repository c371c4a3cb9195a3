"""Error rates of rollouts, on thousands of simulated ones."""
