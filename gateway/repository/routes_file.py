"""``modelport.toml``: models on other servers, and how to reach these servers.

    [models.fraud]
    backend = "triton"                          # triton (any Open Inference Protocol server),
                                                # tfserving, torchserve
    endpoints = ["10.0.0.5:8001", "10.0.0.6:8001"]
    protocol = "grpc"                           # or "http"
    timeout_seconds = 30
    tls = true
    ca_file = "ca.crt"                          # instead of the system's authorities
    client_cert = "tls.crt"                     # mutual TLS
    client_key = "tls.key"
    token_file = "token"                        # sent as a bearer token

    [models.fraud.outlier_detection]            # when endpoints are ejected, in Envoy's terms
    consecutive_5xx = 5

YAML is accepted too. Endpoints come only from this file, never from a request.
"""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository.route_table import RouteTable
from modelport.gateway.runtime.gateway_files import FILES

#: The servers of a route.
BACKENDS = ("triton", "tfserving", "torchserve")
MAX_COUNT = 2**31 - 1
YAML_SUFFIXES = frozenset({".yaml", ".yml"})
#: Keys of version 0.1, whose gateway started TorchServe, Triton and TensorFlow Serving itself.
_REMOVED = (
    "is of an earlier version: the gateway starts no servers; run them by systemd, Compose or "
    "Kubernetes, list their addresses in 'endpoints', and remove this key (docs/serving/routes.md)"
)


class UpstreamProtocol(StrEnum):
    """The protocol of inference requests to a server."""

    GRPC = "grpc"
    HTTP = "http"


class OutlierDetection(NamedTuple):
    """A table ``[models.<name>.outlier_detection]``: when an endpoint is ejected, in Envoy's terms.

    One refused connection, or two consecutive broken ones, always eject. 0 disables a criterion.
    ``upstream.outlier_detection`` has the rule.

    Attributes:
        enabled: whether reachable endpoints are ejected.
        consecutive_5xx: consecutive server errors (500, INTERNAL, UNKNOWN) or slow responses.
        consecutive_gateway_failure: consecutive failures of other kinds: no response in time, not
            ready (502, 503, 504, UNAVAILABLE), missing model, damaged response.
        failure_percentage_threshold: percentage points by which an endpoint fails more often than
            the others.
        failure_percentage_request_volume: the least number of requests to compare.
        latency_factor: a response this many times slower than those of the others is slow.
        interval_seconds: after this time, earlier counts have half the weight; after 200
            requests, or twice ``failure_percentage_request_volume``, too.
        base_ejection_time_seconds: the duration of the first ejection; it doubles each time.
        max_ejection_time_seconds: the longest ejection.
        max_ejection_percent: of the endpoints; one may always be ejected, and one always stays.
    """

    enabled: bool = True
    consecutive_5xx: int = 5
    consecutive_gateway_failure: int = 3
    failure_percentage_threshold: int = 20
    failure_percentage_request_volume: int = 20
    latency_factor: float = 5.0
    interval_seconds: float = 10.0
    base_ejection_time_seconds: float = 0.5
    max_ejection_time_seconds: float = 4.0
    max_ejection_percent: int = 50


class RouteCredentials(NamedTuple):
    """Files with this gateway's credentials for a server; all are read again when they change.

    Attributes:
        ca_file: authorities of the server's certificate; by default, the system's.
        client_cert: client certificate and chain.
        client_key: the certificate's key.
        token_file: a token for ``authorization: Bearer``.
    """

    ca_file: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None
    token_file: Path | None = None


class ModelRoute(NamedTuple):
    """A table ``[models.<name>]``.

    Attributes:
        backend: ``triton``, ``tfserving`` or ``torchserve``.
        endpoints: ``host:port``, or ``[v6]:port``; at least one.
        protocol: of inference requests.
        tls: whether connections are encrypted (server certificates are verified).
        credentials: the keys ``ca_file``, ``client_cert``, ``client_key`` and ``token_file``.
        management: ``host:port`` of TorchServe's management API, if any.
        model: the model's name on the server; empty: the same as here.
        version: its version on the server; empty: the version requested here.
        label: TensorFlow Serving's version label, instead of a version; empty: none.
        timeout_seconds: the time limit of a request to the server.
        connect_timeout_seconds: the time limit of a connection attempt.
        max_reply_bytes: the largest response.
        config: a ``config.pbtxt`` for a model that is not in the repository; by default, the
            server's metadata is used.
        outlier_detection: when an endpoint is ejected.
    """

    backend: str
    endpoints: tuple[str, ...] = ()
    protocol: UpstreamProtocol = UpstreamProtocol.GRPC
    tls: bool = False
    credentials: RouteCredentials = RouteCredentials()
    management: str = ""
    model: str = ""
    version: str = ""
    label: str = ""
    timeout_seconds: float = 60.0
    connect_timeout_seconds: float = 5.0
    max_reply_bytes: int = 256 * 1024 * 1024
    config: Path | None = None
    outlier_detection: OutlierDetection = OutlierDetection()


def load(path: Path) -> dict[str, ModelRoute]:
    """Read the routes in ``path``, by model: TOML, or YAML by its suffix.

    Files that it names are relative to its folder.

    Raises:
        InvalidArgument: naming the file, the table, the key, and the valid values.
    """
    content = _read(path)
    top = RouteTable(str(path), content)
    if "servers" in top:
        raise top.wrong("servers", _REMOVED)
    models = top.take("models", dict, {})
    top.finish()
    return {
        name: _route(f"{path}: [models.{name}]", name, content, path)
        for name, content in RouteTable(f"{path}: [models]", models)
    }


def _read(path: Path) -> Any:
    try:
        text = FILES.keep("routes", path).read().decode()
        if path.suffix == ".toml":
            import tomllib  # lazy, like yaml

            return tomllib.loads(text)
        if path.suffix in YAML_SUFFIXES:
            return _yaml(text)
    except FileNotFoundError:
        raise InvalidArgument(f"{path} does not exist") from None
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # from tomllib, the decoding, and ``_yaml``
        raise InvalidArgument(f"{path} does not parse: {error}") from error
    raise InvalidArgument(f"{path} must end in .toml, .yaml or .yml")


def _yaml(text: str) -> Any:
    import yaml

    class UniqueKeyLoader(yaml.SafeLoader):  # type: ignore[misc]
        """A loader that refuses repeated keys, which PyYAML accepts."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value]
            for key, _ in node.value:
                if keys.count(key.value) > 1:
                    raise ValueError(f"'{key.value}' is repeated in line {key.start_mark.line + 1}")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, UniqueKeyLoader) or {}
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def _route(where: str, name: str, content: Any, file: Path) -> ModelRoute:
    from modelport.gateway.repository.scan import is_model_name

    if not is_model_name(name):
        raise InvalidArgument(
            f"{where}: a model's name is that of a folder: without '/', '\\' and unprintable "
            "characters, not beginning with a dot, and not long"
        )
    table = RouteTable(where, content)
    if "managed" in table:
        raise table.wrong("managed", _REMOVED)
    if "backend" not in table:
        raise InvalidArgument(f"{where} needs 'backend', one of {', '.join(BACKENDS)}")
    default = ModelRoute(table.choice("backend", BACKENDS, ""))
    route = default._replace(
        **table.simple(default),
        endpoints=tuple(table.address("endpoints", value) for value in table.texts("endpoints")),
        protocol=UpstreamProtocol(
            table.choice("protocol", tuple(UpstreamProtocol), UpstreamProtocol.GRPC.value)
        ),
        credentials=RouteCredentials(
            *(table.file(key, file.parent) for key in RouteCredentials._fields)
        ),
        config=file.parent / text if (text := table.take("config", str, "")) else None,
        outlier_detection=_outlier_detection(where, table.take("outlier_detection", dict, {})),
    )
    if route.management:
        table.address("management", route.management)
    table.finish()
    _check(table, route)
    return route


def _outlier_detection(where: str, content: Any) -> OutlierDetection:
    table = RouteTable(f"{where} [outlier_detection]", content)
    found = OutlierDetection(**table.simple(OutlierDetection()))
    for key, value in found._asdict().items():
        percentage = key in ("failure_percentage_threshold", "max_ejection_percent")
        most = 100 if percentage else MAX_COUNT
        if type(value) is int and not 0 <= value <= most:
            raise table.wrong(key, f"must be from 0 to {most}, not {value}")
    if found.latency_factor and not 1 < found.latency_factor < math.inf:
        raise table.wrong("latency_factor", f"must be above 1, or 0, not {found.latency_factor:g}")
    table.finish()
    return found


def _check(table: RouteTable, route: ModelRoute) -> None:
    """Check the keys of a route against each other."""
    for key in ("ca_file", "client_cert", "client_key"):
        if key in table and not route.tls:
            raise table.wrong(key, "needs 'tls = true'")
    if (route.credentials.client_cert is None) != (route.credentials.client_key is None):
        raise table.wrong("client_cert", "and 'client_key' belong together; give both")
    if not route.endpoints:
        raise InvalidArgument(f"{table.where} needs 'endpoints', a list of 'host:port'")
    if len(set(route.endpoints)) != len(route.endpoints):
        raise table.wrong("endpoints", "repeats an endpoint")
    if route.management and route.backend != "torchserve":
        raise table.wrong("management", "is for 'backend' torchserve only")
    if route.label and (route.backend != "tfserving" or route.version):
        raise table.wrong("label", "is for 'backend' tfserving only, and instead of 'version'")
    if not 0 < route.max_reply_bytes < 2**31:
        raise table.wrong("max_reply_bytes", "must be above 0 and below 2147483648")
    if route.config is not None and FILES.is_disk and not route.config.is_file():
        raise table.wrong("config", f"is not a file: {route.config} does not exist")
