"""The exporters' commands, one module each.

To add one, write it here, and add it to the table in ``modelport/cli.py``.
"""
