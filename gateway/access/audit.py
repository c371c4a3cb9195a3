"""The audit log: one line of JSON for each refusal and each control operation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Final

from modelport.gateway.telemetry.log_file import LogFile, dump, stamp

#: Longer names are cut.
MAX_TEXT: Final = 256


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """A refusal or a control operation.

    Attributes:
        principal: Name of the caller.
        credential: Fingerprint of its credential, never the credential.
        source: Address of the client.
        operation: Operation of the rules; ``action`` is what was asked for: ``load``, ``rollback``.
        outcome: ``allowed``, ``refused`` or ``failed``.
        reason: Message of the refusal or of the failure.
    """

    principal: str
    credential: str
    source: str
    operation: str
    action: str
    model: str
    version: str
    outcome: str
    reason: str = ""
    request_id: str = ""


class AuditLog(LogFile[bytes]):
    """The audit log of one process; its arguments and errors are those of ``LogFile``."""

    def __init__(self, target: str, max_bytes: int | None = None) -> None:
        super().__init__(bytes, "audit-log", target, max_bytes)

    def write(self, event: AuditEvent) -> None:
        """Queue ``event``, without waiting."""
        fields = {
            name: value[:MAX_TEXT].encode("utf-8", "replace").decode()
            for name, value in asdict(event).items()
            if value
        }
        self.append(dump({"time": stamp(datetime.now(UTC)), **fields}))
