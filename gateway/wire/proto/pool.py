"""Descriptor pool of this package.

TensorFlow and ``tensorflow-serving-api`` define messages of the same full names in protobuf's
default pool, where a second definition is an error.
"""

from __future__ import annotations

from google.protobuf import any_pb2, empty_pb2, wrappers_pb2
from google.protobuf.descriptor_pool import DescriptorPool

POOL = DescriptorPool()

for _module in (any_pb2, empty_pb2, wrappers_pb2):
    POOL.AddSerializedFile(_module.DESCRIPTOR.serialized_pb)
