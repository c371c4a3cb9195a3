"""Model repositories in object storage: ``s3://``, ``gs://`` and ``az://``.

``location`` names one, ``objects`` speaks to it, ``mirror`` keeps a local copy of what is served.
"""
