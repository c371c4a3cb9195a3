"""The caller of the request in progress, and its operation.

Transports set ``CURRENT`` in the task of each request, only if ``--access`` is given. Its route or
method then enters the declared operation, before the request is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from modelport.gateway.access.audit import MAX_TEXT, AuditEvent, AuditLog
from modelport.gateway.access.operations import Operation
from modelport.gateway.access.policy import OperationRights, PrincipalRights
from modelport.gateway.access.principal import ConnectionIdentity, Principal
from modelport.gateway.errors import ModelportError, PermissionDenied, Unauthenticated
from modelport.gateway.telemetry import request_record

#: The fields of a request's head, names in lower case.
Fields = Iterable[tuple[bytes, bytes]]
_REQUEST_ID = b"x-request-id"
_MAX_REQUEST_ID = 128
_NOT_ENTERED = OperationRights(None, ())
NO_CREDENTIAL = (
    "the request has no credential; send 'authorization: Bearer KEY', or what this gateway accepts"
)


class AccessRecord:
    """A request's part in the audit log, and the fields that access adds to its response.

    Attributes:
        headers: The fields of the request's head.
        connection: The connection of the request.
        response_headers: Fields that the transport adds to the response, or to the trailing
            metadata over gRPC. They replace fields of the same name.
        is_refused: Whether the request was refused by rules or quotas.
    """

    __slots__ = ("_audit", "connection", "headers", "is_refused", "response_headers")

    def __init__(
        self, headers: Fields, connection: ConnectionIdentity, audit: AuditLog | None
    ) -> None:
        self.response_headers: Sequence[tuple[bytes, bytes]] = ()
        self.is_refused = False
        self.headers, self.connection, self._audit = headers, connection, audit

    def add_fields(self, *fields: tuple[bytes, bytes]) -> None:
        """Have the transport add fields to the response, in place of those of the same name."""
        if self.response_headers:
            fields = tuple((dict(self.response_headers) | dict(fields)).items())
        self.response_headers = fields

    def write(
        self, caller: Principal, operation: str, action: str, model: str, version: str,
        outcome: str, reason: str,
    ) -> None:  # fmt: skip
        """Write an event of the request to the audit log, if there is one."""
        if self._audit is not None:
            source = self.connection.address or self.connection.user
            ids = (value for name, value in self.headers if name == _REQUEST_ID)
            request_id = next(ids, b"")[:_MAX_REQUEST_ID].decode("latin-1")
            self._audit.write(
                AuditEvent(
                    caller.name, caller.fingerprint, source, operation, action, model[:MAX_TEXT],
                    version, outcome, reason, request_id,
                )
            )  # fmt: skip


class AccessContext:
    """The caller of a request, and its operation.

    Requests without a record share the contexts of their caller, which never change.

    Attributes:
        caller: The caller, with all its rights.
        rights: The caller's rights to the operation; none before it is entered.
        entered: The contexts of requests that have entered an operation.
        record: Only of a stream, with an audit log, or for a caller with quotas.
    """

    __slots__ = ("caller", "entered", "record", "rights")

    def __init__(
        self,
        caller: PrincipalRights,
        record: AccessRecord | None = None,
        rights: OperationRights = _NOT_ENTERED,
    ) -> None:
        self.caller = caller
        self.record = record
        self.rights = rights
        self.entered: dict[Operation, AccessContext] = {}

    @property
    def principal(self) -> Principal:
        return self.caller.principal

    @property
    def operation(self) -> Operation | None:
        """The operation that was entered."""
        return self.rights.operation

    def add_fields(self, *fields: tuple[bytes, bytes]) -> None:
        """Add fields to the response, as ``AccessRecord.add_fields``, if there is a record."""
        if self.record is not None:
            self.record.add_fields(*fields)

    def entering(self, operation: Operation) -> AccessContext:
        """Return the context of the request in ``operation``.

        Raises:
            Unauthenticated: It needs a credential, and the request has none.
            PermissionDenied: The caller may not perform it on any model.
        """
        entered = self.entered.get(operation)
        if entered is None:
            rights = self.caller.by_operation[operation]
            if not rights.permitted:
                raise self.refusal(operation)
            if self.record is not None:  # the context is that of one request
                self.rights = rights
                return self
            entered = self.entered[operation] = AccessContext(self.caller, rights=rights)
        return entered

    def renew(self, caller: PrincipalRights) -> None:
        """Begin the next request of a stream, by the caller as it is now; raise as ``entering``."""
        operation, record = self.rights.operation, self.record
        assert operation is not None  # the call has entered it
        assert record is not None  # it is a stream
        self.caller, record.is_refused = caller, False
        self.entering(operation)

    def refusal(self, operation: Operation) -> ModelportError:
        """Make the error for an operation that is not allowed on any model."""
        error: ModelportError = Unauthenticated(NO_CREDENTIAL)
        if not self.principal.is_anonymous:
            error = PermissionDenied(
                f"'{self.principal.name}' may not use the operation '{operation}'"
            )
        self.note_refusal(str(error), operation)
        return error

    def note_refusal(
        self, reason: str, operation: str = "", model: str = "", version: str = ""
    ) -> None:
        """Write the first refusal of a request to the audit log."""
        request = request_record.CURRENT.get()
        if request is not None:
            request.model = request.model or model
        if self.record is not None and not self.record.is_refused:
            self.record.is_refused = True
            refused = operation or self.operation or ""
            self.record.write(self.principal, refused, refused, model, version, "refused", reason)

    def may(self, operation: Operation) -> bool:
        """Whether the caller may perform an operation on some model."""
        return self.caller.by_operation[operation].permitted


CURRENT: ContextVar[AccessContext | None] = ContextVar("access", default=None)
#: Refuses the operations of a restricted group of the API (``protocols/header_rules.py``).
RESTRICTION: ContextVar[Callable[[Operation], None] | None] = ContextVar(
    "restriction", default=None
)


def note_refusal(reason: str, model: str = "", version: str = "") -> None:
    """Write to the audit log that the current request is refused, as ``AccessContext`` does."""
    context = CURRENT.get()
    if context is not None:
        context.note_refusal(reason, "", model, version)


def principal_name() -> str:
    """Return the name of the current request's caller; empty for none, and without ``--access``."""
    context = CURRENT.get()
    if context is None or context.principal.is_anonymous:
        return ""
    return context.principal.name


def enter(operation: Operation) -> None:
    """Enter an operation with the current request, as ``AccessContext.entering``."""
    restrict = RESTRICTION.get()
    if restrict is not None:
        restrict(operation)
    context = CURRENT.get()
    if context is not None:
        CURRENT.set(context.entering(operation))


def required(*operations: Operation) -> OperationRights:
    """Return the current caller's rights to the operation that was entered, for models.

    Raises:
        Unauthenticated, PermissionDenied: None was entered, or none of ``operations``: what is
            called belongs to another operation than the one that the route declares. Or the
            operation is open for the server, but allowed on no model.
    """
    context = CURRENT.get()
    if context is None:
        raise Unauthenticated(NO_CREDENTIAL)
    rights = context.rights
    if not rights.has_models or (operations and rights.operation not in operations):
        wanted = rights.operation or Operation.METADATA
        raise context.refusal(operations[0] if operations else wanted)
    return rights


@contextmanager
def audited(action: str, model: str = "", version: str = "") -> Iterator[None]:
    """Write to the audit log that the current request performs ``action``, and the outcome."""
    context = CURRENT.get()
    record = None if context is None else context.record
    if context is None or record is None:
        yield
        return
    event = context.principal, context.operation or "", action, model, version
    try:
        yield
    except BaseException as error:
        if not record.is_refused:
            reason = str(error) if isinstance(error, ModelportError) else type(error).__name__
            record.write(*event, "failed", reason)
        raise
    record.write(*event, "allowed", "")
