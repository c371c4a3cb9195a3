"""The traffic of rollouts in one serving process: assignment, copies, comparison and counting."""
