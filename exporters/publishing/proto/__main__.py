"""``make protos``: generate the messages beside this file."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from tensorflow.core.framework import (
    resource_handle_pb2,
    tensor_pb2,
    tensor_shape_pb2,
    types_pb2,
)

import modelport.exporters.runtime.tensorflow_runtime  # noqa: F401  # before TensorFlow: it keeps it quiet

PROTO = "modelport/exporters/publishing/proto/prediction_log.proto"


def main() -> int:
    """Generate the messages; protoc gets TensorFlow's own as descriptors, as its wheel has no
    sources."""
    found = FileDescriptorSet()
    for module in (types_pb2, tensor_shape_pb2, resource_handle_pb2, tensor_pb2):
        module.DESCRIPTOR.CopyToProto(found.file.add())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tensor.desc"
        path.write_bytes(found.SerializeToString())
        options = [f"--descriptor_set_in={path}", "-I.", "--python_out=.", "--pyi_out=."]
        # In its own process: two copies of protobuf's C++ library cannot share one.
        return subprocess.call([sys.executable, "-m", "grpc_tools.protoc", *options, PROTO])


if __name__ == "__main__":
    raise SystemExit(main())
