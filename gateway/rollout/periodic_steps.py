"""The periodic steps of the controller: they go on after errors, which are logged once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import structlog

from modelport.gateway.errors import ModelportError

log = structlog.get_logger("modelport.rollout")


async def repeated(
    step: Callable[[], Awaitable[None]],
    pause: Callable[[], float],
    wake: asyncio.Event,
    now: Callable[[], float],
) -> None:
    """Repeat ``step``, with ``pause`` seconds in between; ``wake`` ends a pause."""
    said = ""
    while True:
        began = now()
        try:
            await step()
            said = ""
        except ModelportError as error:
            if said != str(error):
                log.warning("rollouts cannot be followed", reason=str(error))
            said = str(error)
        except Exception:
            log.exception("rollouts cannot be followed")
        # At least a part of the pause: a slow store is not asked all the time.
        seconds = max(pause() / 4, began + pause() - now())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await wake.wait()
        wake.clear()
