"""TensorFlow Serving's monitoring configuration: metrics on the port of its REST API."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import text_format

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.runtime.gateway_files import FILES
from modelport.gateway.server.admin.metrics_port import TFSERVING_PATH
from modelport.gateway.wire.proto import serving_pb2


def prometheus_path(file: Path) -> str:
    """Read the metrics path that ``prometheus_config`` in ``file`` enables, or an empty string.

    Raises:
        InvalidArgument: The file cannot be read or parsed, or its path is invalid.
    """
    config = serving_pb2.MonitoringConfig()
    try:
        text_format.Parse(FILES.keep("monitoring", file).read().decode(), config)
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise InvalidArgument(
            f"'{file}' is not a tensorflow.serving.MonitoringConfig: {str(error).strip()}"
        ) from error
    if not config.prometheus_config.enable:
        return ""
    path: str = config.prometheus_config.path or TFSERVING_PATH
    if not path.startswith("/"):
        raise InvalidArgument(f"'{file}': the path '{path}' must begin with '/'")
    return path
