"""Publishing versions into a model repository, in a folder or in object storage."""
