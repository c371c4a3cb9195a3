"""The descriptors of this package, apart from protobuf's default pool.

TensorFlow's own messages and the official ``tensorflow-serving-api`` carry the same full names. In
one pool the second definition of a name is an error, so these never enter the one that they use.
"""

from __future__ import annotations

from google.protobuf import any_pb2, empty_pb2, wrappers_pb2
from google.protobuf.descriptor_pool import DescriptorPool

POOL = DescriptorPool()

for _module in (any_pb2, empty_pb2, wrappers_pb2):
    POOL.AddSerializedFile(_module.DESCRIPTOR.serialized_pb)
