"""The parts of ``modelport convert``: reading Keras weights, and holding two models together."""
