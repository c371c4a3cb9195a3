"""Tests of the documentation: its code blocks are run, and what it names exists."""
