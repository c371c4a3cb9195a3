"""Proof that an artifact computes what its checkpoint does, and the certificate of it."""
