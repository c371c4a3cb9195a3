"""The target of a load test: a model at an address, in a protocol."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import SplitResult, quote, unquote, urlsplit

from modelport.gateway.cli.server_credentials import ServerCredentials


class LoadTestProtocol(StrEnum):
    """The protocols of a load; the values are those of ``--protocol``."""

    OIP_HTTP = "oip-http"
    OIP_HTTP2 = "oip-http2"
    OIP_HTTP_BINARY = "oip-http-binary"
    OIP_GRPC = "oip-grpc"
    TFSERVING_HTTP = "tfserving-http"
    TFSERVING_GRPC = "tfserving-grpc"
    TORCHSERVE_HTTP = "torchserve-http"
    TORCHSERVE_GRPC = "torchserve-grpc"
    #: Triton's own client library, unmodified, instead of prepared bytes.
    TRITON_HTTP = "triton-http"
    TRITON_GRPC = "triton-grpc"

    @property
    def is_grpc(self) -> bool:
        return self.value.endswith("-grpc")

    @property
    def secure(self) -> str:
        """The URL scheme of the protocol over TLS: ``oip-https-binary``, ``oip-grpcs``."""
        return self.value.replace("http", "https").replace("grpc", "grpcs")


@dataclass(frozen=True)
class LoadTestTarget:
    """One model at one address, host:port, in one protocol.

    Attributes:
        tls: Whether connections are encrypted.
        credentials: Files of the token, of authorities and of the client certificate. None for a
            command's own servers, which get no token.
    """

    protocol: LoadTestProtocol
    address: str
    model: str
    #: Empty: the server's default version.
    version: str = ""
    tls: bool = False
    credentials: ServerCredentials | None = None

    @property
    def url(self) -> str:
        """The target in one line: ``oip-http://127.0.0.1:8000/fraud/1``; never its credentials."""
        path = [self.model, self.version] if self.version else [self.model]
        scheme = self.protocol.secure if self.tls else self.protocol.value
        return f"{scheme}://{self.address}/" + "/".join(quote(p, safe="") for p in path)


#: Open Inference Protocol by URL scheme, for schemes that leave the protocol open.
SCHEMES = {
    "http": LoadTestProtocol.OIP_HTTP,
    "grpc": LoadTestProtocol.OIP_GRPC,
    "https": LoadTestProtocol.OIP_HTTP,
    "grpcs": LoadTestProtocol.OIP_GRPC,
}
#: Schemes that name their protocol, in clear text and over TLS.
PROTOCOL_SCHEMES = {one.value: one for one in LoadTestProtocol} | {
    one.secure: one for one in LoadTestProtocol
}
FORMS = (
    "PROTOCOL://HOST:PORT/MODEL[/VERSION], http://HOST:PORT/v2/models/MODEL[/versions/VERSION] or "
    "grpc://HOST:PORT/MODEL[/VERSION]; over TLS https:// and grpcs://"
)


def is_tls(scheme: str) -> bool:
    """Whether a URL's scheme means TLS."""
    return scheme in ("https", "grpcs") or scheme in {one.secure for one in LoadTestProtocol}


def parse(url: str) -> LoadTestTarget:
    """Parse ``LoadTestTarget.url``, or a model's URL in the Open Inference Protocol.

    Raises:
        ValueError: it has none of the ``FORMS``; the message says what is missing.
    """
    parts = _split(url, url)
    protocol = SCHEMES.get(parts.scheme) or PROTOCOL_SCHEMES.get(parts.scheme)
    if protocol is None:
        begin = ", ".join([*SCHEMES, *LoadTestProtocol])
        raise ValueError(f"'{url}' does not begin with one of {begin} and ://")
    path = [unquote(part) for part in parts.path.split("/") if part]
    if parts.scheme in ("http", "https"):
        path = _of_v2(path)
    if not 1 <= len(path) <= 2 or parts.query or parts.fragment:
        raise ValueError(f"'{url}' names no model; write {FORMS}")
    where, tls = address(parts.netloc), is_tls(parts.scheme)
    return LoadTestTarget(protocol, where, path[0], "".join(path[1:]), tls)


def _of_v2(path: list[str]) -> list[str]:
    """Model and version in ``v2/models/MODEL/versions/VERSION``; otherwise empty."""
    match path:
        case ["v2", "models", model]:
            return [model]
        case ["v2", "models", model, "versions", version]:
            return [model, version]
    return []


def address(text: str) -> str:
    """Extract ``host:port`` from ``host:port`` or ``http://host:port``.

    Raises:
        ValueError: no host, or no port between 1 and 65535.
    """
    scheme, separator, rest = text.rpartition("://")
    if separator and scheme not in SCHEMES:
        raise ValueError(f"'{text}': give HOST:PORT, http://HOST:PORT or https://HOST:PORT")
    parts = _split(text, f"//{rest}")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"'{text}': {error}") from None
    if not parts.hostname or not port or parts.path.strip("/") or parts.username or parts.query:
        raise ValueError(f"'{text}' is not HOST:PORT or http://HOST:PORT")
    return parts.netloc


def _split(given: str, url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:  # unbalanced brackets
        raise ValueError(f"'{given}': {error}") from None
