"""Benchmarks of modelport against its own targets: added latency, memory, overload, start-up."""
