"""The runtime behind the module: of a worker process, or none in a plain program or test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from triton_python_backend_utils._errors import TritonModelException

if TYPE_CHECKING:
    from triton_python_backend_utils._requests import InferenceRequest, InferenceResponse

BLS_REFUSED = "BLS is only supported during the 'execute' function."


class Runtime:
    """The runtime of a plain program: logs go to stderr, metrics stay here, no model is served.

    A worker process replaces it by its own.
    """

    #: The version's folder.
    model_dir = "."

    def log(self, level: str, message: str, file: str, line: int) -> None:
        print(f"{level} {file}:{line}] {message}", file=sys.stderr)

    def infer(self, request: InferenceRequest) -> InferenceResponse:
        """Send ``request`` to another model and wait for its response."""
        raise TritonModelException(BLS_REFUSED)

    def stream(self, request: InferenceRequest) -> Iterator[InferenceResponse]:
        """Send ``request`` to a decoupled model; closing the iterator cancels it."""
        raise TritonModelException(BLS_REFUSED)

    async def stream_async(self, request: InferenceRequest) -> Iterator[InferenceResponse]:
        """``stream``, whose first response or end has come, as in Triton."""
        raise TritonModelException(BLS_REFUSED)

    async def infer_async(self, request: InferenceRequest) -> InferenceResponse:
        """``infer``, without blocking the running event loop."""
        raise TritonModelException(BLS_REFUSED)

    def control(self, operation: str, content: bytes = b"", **arguments: Any) -> Any:
        """Load, unload or look at a model; raises ``TritonModelException`` if that fails."""
        raise TritonModelException(BLS_REFUSED)

    def declare_metrics(self, name: str, description: str, kind: str) -> None:
        """Declare a family of metrics; raises ``TritonModelException`` if it cannot be."""

    def update_metric(
        self, family: str, labels: tuple[tuple[str, str], ...], operation: str, value: float
    ) -> None:
        """Note ``increment``, ``set`` or ``observe`` of a metric."""

    def metric_value(self, family: str, labels: tuple[tuple[str, str], ...]) -> float | None:
        """The value that all instances of the model share; None: only this process has it."""
        return None


class Current:
    """The runtime of this process."""

    runtime = Runtime()
