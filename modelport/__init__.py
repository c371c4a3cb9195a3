"""Export a trained model, prove the artifact, serve it, measure it and roll it out."""

__version__ = "0.1.0"
