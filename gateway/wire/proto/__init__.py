"""Protobuf messages of all protocols, generated from the ``.proto`` files here.

The files hold the used part of the originals, with their packages, names and field numbers; other
fields are skipped. ``make protos`` regenerates the Python modules, which use ``pool.POOL``.
"""
