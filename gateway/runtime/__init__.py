"""Services of the process: timers, memory, signals, threads."""
