"""Figures of exports: every format, whole commands, and lowered models beside others."""
