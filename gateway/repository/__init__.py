"""Model repositories on disk and in object storage: models, versions, configuration, manifests."""
