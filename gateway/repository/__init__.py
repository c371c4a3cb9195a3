"""What lies on disk: models, versions, ``config.pbtxt``, manifests. Read here, served elsewhere."""
