"""The gateway's commands, one module each.

To add one, write it here, and add it to the table in ``modelport/cli.py``. An option of ``serve``
has three places: ``serve`` (the flag), ``serve_settings`` (its checks) and ``gateway.settings``.
"""
