"""Failures of TLS connections to servers, in words that name the remedy."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import Final

_NOT_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG"})
_ALERT: Final = "_ALERT_"
#: Alerts about the certificate of the client.
_REFUSALS: Final = ("UNKNOWN_CA", "CERTIFICATE", "ACCESS_DENIED")
#: OpenSSL's codes of certificates that no authority makes right.
_REMEDIES: Final = {
    9: "the server needs one that is valid already",
    10: "the server needs a new one",
    62: "call the server by a name that its certificate has",
    64: "call the server by a name that its certificate has",
}
_AUTHORITY: Final = "give the authority that signed it, as with --ca-file"


def explain(error: BaseException, url: str) -> str | None:
    """Explain why a connection to ``url`` failed; None if the reason is not TLS."""
    found = next(_of_tls(error), None)
    if found is None:
        return None
    reason = found.reason or ""
    if isinstance(found, ssl.SSLCertVerificationError):
        said = found.verify_message.rstrip(".")
        remedy = _REMEDIES.get(found.verify_code, _AUTHORITY)
        return f"the certificate of {url} cannot be trusted ({said}); {remedy}"
    if reason in _NOT_TLS:
        return f"{url} does not serve TLS; call it by http or grpc"
    alert = reason.partition(_ALERT)[2]
    said = (alert or reason or str(found)).replace("_", " ").lower()
    if any(name in alert for name in _REFUSALS):
        return f"{url} refuses the client certificate ({said}); give one that it accepts"
    return f"there is no TLS connection to {url} ({said})"


def _of_tls(error: BaseException | None) -> Iterator[ssl.SSLError]:
    """Yield the errors of OpenSSL that ``error`` stands for."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        # aiohttp's own are of the class of the error that they have.
        for name in ("certificate_error", "os_error"):
            each = getattr(error, name, None)
            if isinstance(each, ssl.SSLError):
                yield each
        if isinstance(error, ssl.SSLError):
            yield error
        error = error.__cause__ or error.__context__
