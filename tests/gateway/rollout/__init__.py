"""Rollouts: statistics, traffic, state."""
