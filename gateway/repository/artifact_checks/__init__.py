"""Checks of artifacts before a framework opens them, and the guards under which it loads them.

To add one for a format, write ``<format>_guard.check`` here, and call it where the format is
opened: in its module in ``backends.embedded`` and in ``exporters.formats``.
"""
