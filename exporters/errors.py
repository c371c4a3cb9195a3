"""The error of the exporters."""

from __future__ import annotations

from modelport.gateway.errors import ModelportError


class ParityError(ModelportError):
    """Artifact and checkpoint disagree; the message names output, error, tolerance and sizes."""

    exit_code = 3
