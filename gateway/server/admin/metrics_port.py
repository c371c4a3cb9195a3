"""The metrics port: ``GET /metrics`` in the Prometheus text format.

``/monitoring/prometheus/metrics`` is TensorFlow Serving's path of the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from google.protobuf import text_format
from prometheus_client import CollectorRegistry, exposition

from modelport.gateway.access.access import Access
from modelport.gateway.access.access_metrics import AccessCollector
from modelport.gateway.access.context import CURRENT, enter
from modelport.gateway.access.operations import Operation
from modelport.gateway.access.policy import AllowedVersions
from modelport.gateway.errors import (
    Code,
    InvalidArgument,
    MemoryExhausted,
    ModelportError,
    plain_reason,
)
from modelport.gateway.protocols.asgi import App, Receive, Scope, Send, turn
from modelport.gateway.protocols.authenticated_application import (
    answering_refusals,
    authenticated,
)
from modelport.gateway.rollout.rollout_metrics import RolloutCollector
from modelport.gateway.runtime.file_watcher import FileWatcher
from modelport.gateway.runtime.gateway_files import FILES
from modelport.gateway.server.admin.rollout_control import RolloutControl
from modelport.gateway.server.http1.listener import HttpListener
from modelport.gateway.server.listening_socket import bind
from modelport.gateway.server.tls.certificate import ServerCertificate, certificate_families
from modelport.gateway.settings import Settings
from modelport.gateway.telemetry.metrics import FamiliesCollector
from modelport.gateway.wire.proto import serving_pb2

#: The client library appends ``_total`` to counters; the names of other servers do not have it.
_SUFFIX = re.compile(
    rb"^(# (?:HELP|TYPE) (?:nv_\w+|ts_\w+_microseconds|Requests\dXX|:tensorflow:\S+))_total ",
    re.MULTILINE,
)
#: The client library sorts labels; TorchServe writes the host last.
_HOST_FIRST = re.compile(
    rb'^((?:ts_|Requests)\w+\{)([Hh]ostname="[^"]*"),(.*)(\} \S+)$', re.MULTILINE
)
#: The label of a sample that names its model; names need no escapes.
_MODEL = re.compile(rb'[{,]model(?:_name)?="([^"]*)"')
_VERSION = re.compile(rb'[{,](?:model_)?version="([^"]*)"')
#: Content type and body.
Text = tuple[str, bytes]
#: Connection limit; these may use the reserved file descriptors.
CONNECTIONS = 64
TFSERVING_PATH = "/monitoring/prometheus/metrics"
Scrape = Callable[[], Awaitable[Text]]
_REFUSALS = {Code.UNAUTHENTICATED: 401, Code.PERMISSION_DENIED: 403, Code.UNAVAILABLE: 503}


def listener(
    settings: Settings,
    rollouts: RolloutControl,
    certificate: ServerCertificate | None,
    access: Access | None,
    scrape: Scrape,
) -> HttpListener:
    """Make the listener of the metrics, and of the API of rollouts."""
    app = rollouts.application(application(scrape))
    if access is not None:
        app = authenticated(answering_refusals(app, refuse), access, refuse)
    bound = bind(settings.metrics_address, settings.metrics_port, "--metrics-port")
    tls = None if certificate is None else certificate.http
    return HttpListener(app, bound, most=CONNECTIONS, tls=tls)


def register(
    registry: CollectorRegistry,
    rollouts: RolloutControl,
    certificate: ServerCertificate | None,
    access: Access | None,
    watcher: FileWatcher,
) -> None:
    """Add the metrics of the whole gateway, which its workers do not have."""
    registry.register(RolloutCollector(rollouts.service.statuses))
    if certificate is not None:
        registry.register(FamiliesCollector(partial(certificate_families, certificate)))
    if access is not None:
        registry.register(AccessCollector(watcher, access))


def text(registry: CollectorRegistry) -> Text:
    """Format the current values of ``registry``."""
    content = _SUFFIX.sub(rb"\1 ", exposition.generate_latest(registry))
    return exposition.CONTENT_TYPE_LATEST, _HOST_FIRST.sub(rb"\1\3,\2\4", content)


def application(scrape: Scrape) -> App:
    """Make the ASGI application of the metrics port."""
    return mount(_not_found, scrape, "/metrics", TFSERVING_PATH)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await _answer(send, 404, "application/json", b'{"error":"Not Found"}')


def mount(app: App, scrape: Scrape, *paths: str) -> App:
    """Add the metrics at ``paths`` to ``app``."""

    async def both(scope: Scope, receive: Receive, send: Send) -> None:
        is_here = scope["type"] == "http" and scope["path"] in paths
        if is_here and scope["method"] in ("GET", "HEAD"):
            enter(Operation.METRICS)
            try:
                async with turn(scope):
                    content_type, content = await scrape()
                    await _answer(send, 200, content_type, _visible(content))
            except MemoryExhausted as error:
                await refuse(scope, receive, send, error)
        else:
            await app(scope, receive, send)

    return both


async def refuse(scope: Scope, receive: Receive, send: Send, error: ModelportError) -> None:
    """Answer a request to the port that is not allowed, or whose token cannot be verified yet."""
    status = _REFUSALS[error.code]
    body = json.dumps({"error": str(error)}).encode()
    await _answer(send, status, "application/json", body)


def _visible(content: bytes) -> bytes:
    """Remove the samples of models and versions that the caller may not see.

    A sample of a whole model is for those who may see all of its versions.
    """
    context = CURRENT.get()
    if context is None or context.rights.unrestricted:
        return content
    versions = context.rights.versions
    return b"".join(line for line in content.splitlines(keepends=True) if _shows(line, versions))


def _shows(line: bytes, allowed: AllowedVersions) -> bool:
    model = _MODEL.search(line)
    if model is None:
        return True
    versions = allowed[model[1].decode()]
    if not versions:
        return versions is not None
    version = _VERSION.search(line)
    return version is not None and version[1].decode() in versions


async def _answer(send: Send, status: int, content_type: str, body: bytes) -> None:
    headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def prometheus_path(file: Path) -> str:
    """Read TensorFlow Serving's monitoring configuration: metrics on the port of its REST API.

    Return the path that ``prometheus_config`` in ``file`` enables, or an empty string.

    Raises:
        InvalidArgument: The file cannot be read or parsed, or its path is invalid.
    """
    config = serving_pb2.MonitoringConfig()
    try:
        text_format.Parse(FILES.keep("monitoring", file).read().decode(), config)
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise InvalidArgument(
            f"'{file}' is not a tensorflow.serving.MonitoringConfig: {plain_reason(error)}"
        ) from error
    if not config.prometheus_config.enable:
        return ""
    path: str = config.prometheus_config.path or TFSERVING_PATH
    if not path.startswith("/"):
        raise InvalidArgument(f"'{file}': the path '{path}' must begin with '/'")
    return path
