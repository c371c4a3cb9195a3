"""Recorded traffic: requests and their answers in files of JSON Lines, written and read."""
