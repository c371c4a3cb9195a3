"""Model repositories in object storage: ``s3://``, ``gs://`` and ``az://``.

``location`` parses its address, ``objects`` accesses it, ``mirror`` keeps a local copy of served
versions.
"""
