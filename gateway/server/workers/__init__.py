"""Worker processes that serve on the same ports, and the parent that coordinates them."""
