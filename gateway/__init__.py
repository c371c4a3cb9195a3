"""The inference gateway: one model repository, every protocol, any backend."""
