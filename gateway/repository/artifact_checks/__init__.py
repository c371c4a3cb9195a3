"""Checks of artifacts before a framework opens them, and the guards under which it loads them."""
