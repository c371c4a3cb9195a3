"""Settings of traces and of the log that clients may change, as by Triton's extensions.

A change reaches all worker processes.
"""

from __future__ import annotations

from typing import Any

from modelport.gateway.access.context import audited, note_refusal, required
from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import InvalidArgument, NotFound, PermissionDenied, Unavailable
from modelport.gateway.models.control import Control
from modelport.gateway.models.model_view import ModelView
from modelport.gateway.telemetry.logs import LOGS, read_log_changes
from modelport.gateway.telemetry.trace_settings import read_changes
from modelport.gateway.telemetry.tracer import Tracer

_TRACE, _LOG = "update trace settings", "update log settings"


class ProcessSettings:
    """The settings of traces and of the log, kept equal in all worker processes."""

    def __init__(self, control: Control, manager: ModelView, tracer: Tracer, guarded: bool) -> None:
        self._control, self._manager, self._tracer = control, manager, tracer
        self._is_guarded = guarded
        control.register(_TRACE, self._trace, state=self._traces, restore=self._restore_traces)
        control.register(_LOG, self._log, state=LOGS.document, restore=self._restore_log)

    def traces(self, model: str) -> dict[str, Any]:
        """The settings of traces of a model, or the global ones.

        Raises:
            InvalidArgument: The model is not served; the text is Triton's.
        """
        if model:
            try:
                self._manager.get(model, 0)
            except (NotFound, Unavailable) as error:
                raise InvalidArgument(f"Request for unknown model : {model[:256]}") from error
        return self._tracer.document(model)

    async def trace(self, model: str, document: dict[str, Any]) -> dict[str, Any]:
        """Change settings of traces; return all.

        Raises:
            InvalidArgument, Unsupported: As ``traces``, and ``trace_settings.read_changes``.
        """
        self.traces(model)
        changes = read_changes(document)
        if changes:
            self._require_all()
            with audited(_TRACE, model):
                await self._control.broadcast(_TRACE, {"model": model, "changes": changes})
        return self.traces(model)

    async def log(self, document: dict[str, Any]) -> dict[str, Any]:
        """Change settings of the log; return all. Raises as ``read_log_changes``."""
        changes = read_log_changes(document)
        if changes:
            self._require_all()
            with audited(_LOG):
                await self._control.broadcast(_LOG, changes)
        return LOGS.document()

    def _require_all(self) -> None:
        """Raise ``PermissionDenied`` if the caller may not control all models."""
        if self._is_guarded and not required(Operation.CONTROL).unrestricted:
            message = f"this needs the operation '{Operation.CONTROL}' on all models"
            note_refusal(message)
            raise PermissionDenied(message)

    # -- in every worker --------------------------------------------------------------------------

    async def _trace(self, arguments: dict[str, Any]) -> None:
        changes = arguments["changes"]
        if isinstance(changes.get("trace_level"), list):  # it has been JSON
            changes["trace_level"] = tuple(changes["trace_level"])
        self._tracer.update(arguments["model"], changes)

    def _traces(self) -> dict[str, Any]:
        return self._tracer.settings.changed

    async def _restore_traces(self, arguments: dict[str, Any]) -> None:
        for model in {*self._tracer.settings.changed, *arguments["state"]}:
            changes = dict.fromkeys(self._tracer.settings.changed.get(model, {}))
            changes |= arguments["state"].get(model, {})
            await self._trace({"model": model, "changes": changes})

    async def _log(self, arguments: dict[str, Any]) -> None:
        LOGS.update(arguments)

    async def _restore_log(self, arguments: dict[str, Any]) -> None:
        LOGS.update({k: v for k, v in arguments["state"].items() if k != "log_file"})
