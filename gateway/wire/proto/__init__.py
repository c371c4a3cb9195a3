"""Messages of TensorFlow Serving and TorchServe, generated from the ``.proto`` files here.

The files hold what is used of the originals, with their packages, names and field numbers; a field
that is not here is skipped in what comes in. ``make protos`` generates the Python anew, into
``pool.POOL``.
"""
