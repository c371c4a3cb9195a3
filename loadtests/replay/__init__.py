"""Recorded requests, sent again."""
