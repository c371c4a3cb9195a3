"""The state of rollouts, which the gateways of a repository share through its storage."""
