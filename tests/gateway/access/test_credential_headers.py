"""Credentials are found where clients put them; two different ones are never a choice."""

from __future__ import annotations

import hashlib

import pytest

from modelport.gateway.access.authentication import AuthenticatorChain, combined
from modelport.gateway.access.credential_headers import MAX_CREDENTIAL_BYTES, fingerprint, presented
from modelport.gateway.access.principal import ANONYMOUS, UNKNOWN_CONNECTION
from modelport.gateway.errors import Unauthenticated

SAGEMAKER = b"x-amzn-sagemaker-custom-attributes"
SIGNED = b"AWS4-HMAC-SHA256 Credential=AKID/20300101/eu/sagemaker/aws4_request, Signature=00"


@pytest.mark.parametrize(
    "headers",
    [
        {b"authorization": b"Bearer key"},
        {b"authorization": b"bearer   key "},
        {b"x-api-key": b"key"},
        {b"x-goog-api-key": b"key"},
        {SAGEMAKER: b"x-api-key=key"},
        {SAGEMAKER: b"trace=1; X-Api-Key=key;accept_eula=true"},
        {SAGEMAKER: b"x-api-key=key", b"authorization": SIGNED},
        {b"x-api-key": b"key", b"authorization": SIGNED},
        {SAGEMAKER: b"x-api-key=key,x-api-key=key", b"authorization": b"Bearer key"},
        {b"authorization": b"Bearer key", b"x-api-key": b"key", b"x-goog-api-key": b"key"},
    ],
)
def test_a_credential_is_found_in_the_headers_of_every_dialect(headers: dict[bytes, bytes]) -> None:
    assert presented(headers) == b"key"


@pytest.mark.parametrize(
    "headers",
    [
        {b"authorization": b"Bearer key", b"x-api-key": b"other"},
        {b"authorization": b"Bearer " + SIGNED, b"x-api-key": b"key"},
        {b"x-api-key": SIGNED, b"x-goog-api-key": b"key"},
        {b"x-api-key": b"key", b"x-goog-api-key": b"other", b"authorization": SIGNED},
        {b"x-api-key": b"key", b"authorization": SIGNED + b", Bearer other"},
        {b"x-api-key": b"key", b"authorization": b"AWS4-HMAC-SHA256 x, Bearer other"},
        {b"x-api-key": b"key", b"authorization": SIGNED + b", " + SIGNED},
        {b"authorization": b"Basic key", b"x-api-key": b"key"},
        {b"authorization": b"Bearer ", b"x-api-key": b"key"},
        {b"x-api-key": b"key", b"x-goog-api-key": b""},
        {SAGEMAKER: b"x-api-key=key;x-api-key=other"},
        {SAGEMAKER: b"x-api-key=key;x-api-key=other", b"authorization": SIGNED},
        {SAGEMAKER: b"x-api-key=key", b"authorization": b"Bearer other"},
        {SAGEMAKER: b"x-api-key=key", b"authorization": SIGNED, b"x-api-key": b"other"},
        {b"authorization": SIGNED, b"x-api-key": b"key", b"x-goog-api-key": b"other"},
    ],
)
def test_two_different_credentials_are_refused(headers: dict[bytes, bytes]) -> None:
    with pytest.raises(Unauthenticated, match="more than one credential"):
        presented(headers)


@pytest.mark.parametrize(
    "headers", [{}, {b"accept": b"*/*"}, {SAGEMAKER: b"trace=x-api-key"}, {SAGEMAKER: b""}]
)
def test_a_request_without_a_credential_has_none(headers: dict[bytes, bytes]) -> None:
    assert presented(headers) is None
    assert AuthenticatorChain().authenticate(headers, UNKNOWN_CONNECTION) is ANONYMOUS


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer key")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"")],
        [(b"authorization", b"Basic a2V5Og==")],
        [(b"authorization", SIGNED)],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"key"), (b"x-api-key", b"key")],
        [(b"x-api-key", b"k" * (MAX_CREDENTIAL_BYTES + 1))],
        [(SAGEMAKER, b"x-api-key=")],
    ],
)
def test_a_credential_that_nothing_recognises_is_not_anonymous(
    headers: list[tuple[bytes, bytes]],
) -> None:
    with pytest.raises(Unauthenticated):
        AuthenticatorChain().authenticate(combined(headers), UNKNOWN_CONNECTION)


def test_spaces_and_tabs_around_a_key_are_no_part_of_it() -> None:
    assert presented({b"x-api-key": b"\tmp_key \t"}) == b"mp_key"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"mp_0123456789ab_secret", "mp_0123456789ab"),
        (b"mp_0123456789ab", ""),
        (b"eyJh.eyJi.c", hashlib.sha256(b"eyJh.eyJi.c").hexdigest()[:16]),
        (b"a.b.c", ""),
        (b"password", ""),
        (b"x" * (MAX_CREDENTIAL_BYTES + 1), ""),
        (b"", ""),
    ],
)
def test_a_refused_credential_is_known_by_what_is_no_secret(value: bytes, expected: str) -> None:
    assert fingerprint({b"x-api-key": value}) == expected
