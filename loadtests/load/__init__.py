"""One load on one target: payloads, shapes, users in processes, raw samples and their summary."""
