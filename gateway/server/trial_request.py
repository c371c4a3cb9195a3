"""Requests to a model, by the gateway's loader and service, without listeners."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from modelport.gateway.models.inference_service import InferenceService
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.repository.artifact_checks import trial_load
from modelport.gateway.settings import ModelControlMode, Settings
from modelport.gateway.types import (
    NO_DEADLINE,
    Array,
    Datatype,
    InferRequest,
    Tensor,
    finished,
)


def answers(
    repository: Path, name: str, requests: Sequence[Mapping[str, Array]], native: bool
) -> list[dict[str, Array]]:
    """Load the model ``name``, which this process has made, and answer requests.

    Args:
        requests: inputs by name, in the wire's shapes.
        native: the artifact may run native code, as with a signature or ``--allow-native-code``.

    Raises:
        ModelportError: the gateway refuses the model or the request; the message has the reason.
    """

    async def asked() -> list[dict[str, Array]]:
        settings = Settings(
            (repository,), ModelControlMode.EXPLICIT, allow_native_code=native, cache_bytes=0
        )
        manager = ModelManager(settings)
        try:
            await manager.start()
            await manager.load(name)
            kinds = {spec.name: spec.datatype for spec in manager.get(name).signature.inputs}
            service, found = InferenceService(manager), []
            for inputs in requests:  # what is no input of the model is a text
                request = InferRequest(
                    name,
                    [Tensor(n, kinds.get(n, Datatype.BYTES), array) for n, array in inputs.items()],
                )
                response = await finished(service.infer(request, NO_DEADLINE))
                found.append({tensor.name: tensor.data for tensor in response.outputs})
            return found
        finally:
            await manager.stop()

    # the caller's thread may have a loop that runs, such as a notebook's
    with trial_load.omitted_in(repository), ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, asked()).result()
