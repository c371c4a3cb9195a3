"""Bytes ↔ arrays, shared by the protocols (server side) and the remote backends (client side)."""
