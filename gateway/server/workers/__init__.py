"""Several processes that serve as one gateway: a light parent, its workers, and a hub between."""
