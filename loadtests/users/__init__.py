"""Protocol clients of the load generator, and Locust's users."""
