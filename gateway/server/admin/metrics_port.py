"""The metrics port: ``GET /metrics`` in the Prometheus text format, or as OpenMetrics.

``/monitoring/prometheus/metrics`` is TensorFlow Serving's path of the same. ``?model=NAME`` leaves
out the counters of other models, which are most of the text where there are many.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import parse_qs

from google.protobuf import text_format
from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.utils import floatToGoString

from modelport.gateway.access.access import Access, exposed
from modelport.gateway.access.access_metrics import AccessCollector
from modelport.gateway.access.context import CURRENT, enter
from modelport.gateway.access.operations import Operation
from modelport.gateway.access.policy import AllowedVersions
from modelport.gateway.errors import Code, InvalidArgument, ModelportError, plain_reason
from modelport.gateway.protocols.authentication import authenticated, challenging
from modelport.gateway.protocols.http_message import Answer, Handler, HttpRequest, HttpResponse
from modelport.gateway.protocols.http_response import recovering, refusal
from modelport.gateway.rollout.rollout_metrics import RolloutCollector
from modelport.gateway.runtime.file_watcher import FileWatcher
from modelport.gateway.runtime.gateway_files import FILES
from modelport.gateway.server.admin import console_page
from modelport.gateway.server.admin.console_page import Recent
from modelport.gateway.server.admin.rollout_control import RolloutControl
from modelport.gateway.server.http1.listener import HttpListener
from modelport.gateway.server.listening_socket import bind
from modelport.gateway.server.tls.certificate import ServerCertificate, certificate_families
from modelport.gateway.settings import Settings
from modelport.gateway.telemetry.machine import MACHINE
from modelport.gateway.telemetry.metrics import FamiliesCollector
from modelport.gateway.wire.proto import serving_pb2

#: The client library appends ``_total`` to counters; the names of other servers do not have it.
_SUFFIX = re.compile(
    rb"^(# (?:HELP|TYPE) (?:nv_\w+|ts_\w+_microseconds|Requests\dXX|:tensorflow:\S+))_total ",
    re.MULTILINE,
)
#: The client library sorts labels; TorchServe writes the host last, and Triton a bucket's bound.
_FIRST = re.compile(rb'^(\w+\{)((?:[Hh]ostname|le)="[^"]*"),(.*)(\} \S+)$', re.MULTILINE)
#: The client library writes 3 as 3.0 and a large number as 1.5e+09.
_WHOLE = re.compile(rb"^([^#\n].* )(\d+\.\d+(?:e\+\d+)?)$", re.MULTILINE)
#: The label of a sample that names its model; a name may have quotes, and no other escapes.
_MODEL = re.compile(rb'[{,]model(?:_name)?="((?:[^"\\]|\\")*)"')
_VERSION = re.compile(rb'[{,](?:model_)?version="([^"]*)"')
OPENMETRICS = "application/openmetrics-text"
#: Content type and body.
Text = tuple[str, bytes]
#: Connection limit; these may use the reserved file descriptors.
CONNECTIONS = 64
BUSY = "the metrics port has too many requests in flight; use the HTTP port"
TFSERVING_PATH = "/monitoring/prometheus/metrics"
#: Takes the model whose counters are wanted, None for those of all, and whether as OpenMetrics.
Scrape = Callable[[str | None, bool], Awaitable[Text]]
_STATUS = {
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.UNAVAILABLE: 503,
}


def listener(
    settings: Settings,
    rollouts: RolloutControl,
    certificate: ServerCertificate | None,
    access: Access | None,
    scrape: Scrape,
    api: Handler,
    recent: Recent,
) -> HttpListener:
    """Make the listener of the metrics, of the API of rollouts, and of the console.

    Args:
        api: The handler of the HTTP port's API, which the console uses.
    """

    def limited(request: HttpRequest) -> Answer:
        # Slow models must not hold the connections that a scrape needs.
        busy = len(made.state.requests) >= CONNECTIONS // 2
        return refusal(429, BUSY) if busy else api(request)

    handler = mount(_not_found, scrape, "/metrics", TFSERVING_PATH)
    allowed = settings.allow_console
    if allowed is None:  # a network that may scrape metrics need not be one that may load models
        allowed = not exposed(settings, settings.metrics_address)
    if allowed:
        handler = console_page.mount(handler, limited, recent, access, refuse)
    handler = rollouts.handler(handler)
    if access is not None:
        handler = authenticated(handler, access, refuse)
    bound = bind(settings.metrics_address, settings.metrics_port, "--metrics-port")
    tls = None if certificate is None else certificate.http
    made = HttpListener(handler, bound, most=CONNECTIONS, tls=tls)
    return made


def register(
    registry: CollectorRegistry,
    rollouts: RolloutControl,
    certificate: ServerCertificate | None,
    access: Access | None,
    watcher: FileWatcher,
) -> None:
    """Add the metrics of the whole gateway, which its workers do not have."""
    registry.register(MACHINE)
    registry.register(RolloutCollector(rollouts.service.statuses))
    if certificate is not None:
        registry.register(FamiliesCollector(partial(certificate_families, certificate)))
    if access is not None:
        registry.register(AccessCollector(watcher, access))


def text(registry: CollectorRegistry, is_openmetrics: bool) -> Text:
    """Format the current values of ``registry``."""
    families = list(registry.collect())
    if is_openmetrics:
        converted = _CollectedFamilies([_as_openmetrics(each) for each in families])
        content = openmetrics.generate_latest(converted)  # type: ignore[no-untyped-call]
        return openmetrics.CONTENT_TYPE_LATEST, content
    content = exposition.generate_latest(_CollectedFamilies(families))
    content = _SUFFIX.sub(rb"\1 ", content)
    for name in _plain_counters(families):  # of models
        for kind in (b"HELP", b"TYPE"):
            content = content.replace(
                b"\n# %b %b_total " % (kind, name), b"\n# %b %b " % (kind, name)
            )
    content = _WHOLE.sub(_as_integer, _FIRST.sub(rb"\1\3,\2\4", content))
    return exposition.CONTENT_TYPE_LATEST, content


def _as_openmetrics(family: Metric) -> Metric:
    """A family by OpenMetrics' stricter rules, with the same names.

    A counter whose name does not end in ``_total`` is of an unknown type, and a bucket's bound is a
    decimal number.
    """
    is_plain = any(sample.name == family.name for sample in family.samples)
    made = Metric(
        family.name,
        family.documentation,
        "unknown" if family.type == "counter" and is_plain else family.type,
    )
    for sample in family.samples:
        if "le" in sample.labels:
            bound = floatToGoString(sample.labels["le"])  # type: ignore[no-untyped-call]
            sample = sample._replace(labels=sample.labels | {"le": bound})
        made.samples.append(sample)
    return made


def _as_integer(sample: re.Match[bytes]) -> bytes:
    """Write a whole number as Triton does, which its users' parsers count on."""
    value = float(sample[2])
    return sample[1] + (b"%d" % value if value.is_integer() and value < 2**63 else sample[2])


class _CollectedFamilies(CollectorRegistry):
    """Families that have been collected already."""

    def __init__(self, families: Sequence[Metric]) -> None:
        super().__init__()
        self._collected = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._collected)


def _plain_counters(families: Iterable[Metric]) -> Iterator[bytes]:
    """The names of counters whose samples have the family's own name."""
    for family in families:
        if family.type == "counter" and any(s.name == family.name for s in family.samples):
            yield family.name.encode()


def _not_found(request: HttpRequest) -> HttpResponse:
    return HttpResponse(404, b'{"error":"Not Found"}')


def mount(handler: Handler, scrape: Scrape, *paths: str) -> Handler:
    """Add the metrics at ``paths`` to ``handler``."""

    async def metrics(request: HttpRequest) -> HttpResponse:
        enter(Operation.METRICS)
        async with request.peer.memory.turn():
            accepted = request.fields.get(b"accept", b"").decode("latin-1")
            is_openmetrics = exposition.choose_encoder(accepted)[1].startswith(OPENMETRICS)
            content_type, content = await scrape(_model_of(request.query), is_openmetrics)
            headers = [(b"content-type", content_type.encode())]
            return HttpResponse(200, _visible(content), headers)

    def both(request: HttpRequest) -> Answer:
        if request.path in paths and request.method in ("GET", "HEAD"):
            return recovering(metrics, refuse, request)
        return handler(request)

    return both


def _model_of(query: bytes) -> str | None:
    values = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("model")
    return None if values is None else values[-1]


def refuse(request: HttpRequest, error: ModelportError) -> HttpResponse:
    """Answer a request to the port that is not allowed, or whose token cannot be verified yet."""
    response = HttpResponse(
        _STATUS.get(error.code, 500), json.dumps({"error": str(error)}).encode()
    )
    return challenging(response)


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
    versions = allowed[model[1].replace(b'\\"', b'"').decode()]
    if not versions:
        return versions is not None
    version = _VERSION.search(line)
    return version is not None and version[1].decode() in versions


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
