"""Credentials in the headers of a request, or in the metadata of a call over gRPC.

They come in ``Authorization: Bearer`` (also TorchServe's), ``x-api-key``, ``x-goog-api-key``
(Google's clients) and, as SageMaker forwards no other header of its clients, in
``X-Amzn-SageMaker-Custom-Attributes: x-api-key=KEY``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Final

from modelport.gateway.access.api_key_file import ID_LENGTH, PREFIX
from modelport.gateway.errors import Unauthenticated

#: Longer credentials are refused unread.
MAX_CREDENTIAL_BYTES: Final = 16 * 1024
MORE_THAN_ONE: Final = "the request has more than one credential; send one of them"
_KEY_HEADERS = (b"x-api-key", b"x-goog-api-key")
_SAGEMAKER_ATTRIBUTES = b"x-amzn-sagemaker-custom-attributes"
_SAGEMAKER_KEY = re.compile(rb"(?:^|[;,])\s*x-api-key=([^;,\s]*)", re.IGNORECASE)
#: Headers that may have a credential.
HEADERS = frozenset({b"authorization", *_KEY_HEADERS, _SAGEMAKER_ATTRIBUTES})
#: AWS clients sign each request, which says nothing to anyone but AWS. Nothing else may follow it.
_AWS_SIGNATURE = re.compile(
    rb"aws4-[a-z0-9-]+(?:[ ,]+(?:credential|signedheaders|signature)=[^ ,]+){1,3}", re.IGNORECASE
)
#: Around the value of a field, and no part of it (RFC 9110, 5.5).
WHITESPACE = b" \t"
#: The part of an API key that is no secret.
_KEY_ID = re.compile(rb"(%b[A-Za-z0-9]{%d})_" % (PREFIX.encode(), ID_LENGTH))


def fields(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, ...]:
    """Return the names and values of the fields of a request's head that may have a credential."""
    found: tuple[bytes, ...] = ()
    for field in headers:
        if field[0] in HEADERS:
            found += field
    return found


def presented(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The credential of a request, without the word ``Bearer``; None if there is none.

    Raises:
        Unauthenticated: There is more than one, or it is too long.
    """
    authorization = headers.get(b"authorization")
    found = None if authorization is None else _token(authorization)
    keys = [headers[name].strip(WHITESPACE) for name in _KEY_HEADERS if name in headers]
    keys += _SAGEMAKER_KEY.findall(headers.get(_SAGEMAKER_ATTRIBUTES, b""))
    if keys and authorization is not None and _AWS_SIGNATURE.fullmatch(authorization):
        found = None
    for key in keys:
        found = _only(found, key)
    if found is not None and len(found) > MAX_CREDENTIAL_BYTES:
        raise Unauthenticated(f"the credential is longer than {MAX_CREDENTIAL_BYTES} bytes")
    return found


def fingerprint(headers: Mapping[bytes, bytes]) -> str:
    """Return what the audit log has of a refused credential: a key's ID, or a token's hash.

    All else may be a password, which a hash could reveal.
    """
    try:
        credential = presented(headers) or b""
    except Unauthenticated:
        return ""
    key = _KEY_ID.match(credential)
    if key is not None:
        return key[1].decode()
    is_token = credential.startswith(b"eyJ") and credential.count(b".") == 2
    return token_fingerprint(credential) if is_token else ""


def token_fingerprint(token: bytes) -> str:
    """Return the part of a token's hash that names it in logs."""
    return hashlib.sha256(token).hexdigest()[:16]


def _token(authorization: bytes) -> bytes:
    """The token of ``Bearer``; the whole value of any other scheme."""
    scheme, _, token = authorization.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else authorization


def _only(found: bytes | None, other: bytes) -> bytes:
    if found is None or found == other:
        return other
    raise Unauthenticated(MORE_THAN_ONE)
