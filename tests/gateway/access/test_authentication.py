"""The credential that decides, and the statuses of refusals in every dialect."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from modelport.gateway.access.authentication import Authenticator, AuthenticatorChain, combined
from modelport.gateway.access.principal import (
    ANONYMOUS,
    UNKNOWN_CONNECTION,
    ConnectionIdentity,
    Principal,
)
from modelport.gateway.errors import Code, PermissionDenied, QuotaExceeded, Unauthenticated
from modelport.gateway.protocols.oip.http_errors import STATUS
from modelport.gateway.protocols.tfserving import http as tfserving_http
from modelport.gateway.protocols.tfserving.servable_signatures import STATUSES, code
from modelport.gateway.protocols.torchserve import errors as torchserve_errors
from modelport.gateway.protocols.torchserve import grpc as torchserve_grpc
from modelport.gateway.server.grpc.status import OF_ERRORS, StatusCode


class Password(Authenticator):
    """Recognises requests that state ``header``; the password is the caller's name."""

    def __init__(self, header: bytes, password: bytes) -> None:
        self.header, self.password = header, password

    def authenticate(
        self, headers: Mapping[bytes, bytes], connection: ConnectionIdentity
    ) -> Principal | None:
        stated = headers.get(self.header)
        if stated is None:
            return None
        if stated != self.password:
            raise Unauthenticated("wrong password")
        return Principal(stated.decode(), method=self.header.decode())


PASSWORDS = (Password(b"x-first", b"one"), Password(b"x-second", b"two"))
BOTH = AuthenticatorChain(PASSWORDS)


def test_the_authenticator_that_recognises_the_credential_decides() -> None:
    assert BOTH.authenticate({b"x-second": b"two"}, UNKNOWN_CONNECTION).name == "two"
    assert BOTH.authenticate({b"x-first": b"one"}, UNKNOWN_CONNECTION).name == "one"


def test_a_request_with_two_right_credentials_is_refused() -> None:
    headers = {b"x-first": b"one", b"x-second": b"two"}
    with pytest.raises(Unauthenticated, match="more than one credential"):
        BOTH.authenticate(headers, UNKNOWN_CONNECTION)


def test_the_connection_identifies_only_requests_without_a_credential() -> None:
    class ConnectionPassword(Password):
        of_connection = True

    everybody = AuthenticatorChain((ConnectionPassword(b"accept", b"peer"), *PASSWORDS))
    assert everybody.authenticate({b"accept": b"peer"}, UNKNOWN_CONNECTION).name == "peer"
    headers = {b"accept": b"peer", b"x-first": b"one"}
    assert everybody.authenticate(headers, UNKNOWN_CONNECTION).name == "one"
    with pytest.raises(Unauthenticated):
        everybody.authenticate({b"accept": b"peer", b"x-api-key": b"?"}, UNKNOWN_CONNECTION)


def test_a_wrong_credential_never_falls_through_to_the_next_one_or_to_anonymous() -> None:
    for headers in ({b"x-first": b"two"}, {b"x-first": b"two", b"x-second": b"two"}):
        with pytest.raises(Unauthenticated):
            BOTH.authenticate(headers, UNKNOWN_CONNECTION)


def test_a_request_without_a_credential_is_anonymous() -> None:
    caller = BOTH.authenticate({b"x-other": b"one"}, UNKNOWN_CONNECTION)
    assert caller is ANONYMOUS
    assert caller.is_anonymous


def test_a_credential_that_is_sent_twice_is_a_wrong_one() -> None:
    headers = combined([(b"x-first", b"wrong"), (b"accept", b"a"), (b"x-first", b"one")])
    assert headers[b"x-first"] == b"wrong, one"
    with pytest.raises(Unauthenticated):
        BOTH.authenticate(headers, UNKNOWN_CONNECTION)


def test_every_dialect_has_a_status_for_each_code() -> None:
    assert set(STATUS) == set(OF_ERRORS) == set(Code)
    assert set(torchserve_grpc._NUMBERS) == set(Code)


@pytest.mark.parametrize(
    ("error", "http", "grpc"),
    [
        (Unauthenticated("no"), 401, StatusCode.UNAUTHENTICATED),
        (PermissionDenied("no"), 403, StatusCode.PERMISSION_DENIED),
        (QuotaExceeded(2.5), 429, StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_refusals_have_the_same_status_in_every_dialect(
    error: Unauthenticated | PermissionDenied | QuotaExceeded, http: int, grpc: StatusCode
) -> None:
    assert STATUS[error.code] == http
    assert tfserving_http.STATUS[code(error)] == http
    assert torchserve_errors.document(error)[0] == http
    assert OF_ERRORS[error.code] is grpc
    assert STATUSES[type(error)] == grpc.name
    assert torchserve_grpc._NUMBERS[error.code] == grpc
