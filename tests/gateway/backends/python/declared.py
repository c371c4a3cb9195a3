"""Models of ``@modelport.model`` for tests: a file that ``modelport serve`` takes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, TypedDict

import numpy as np

import modelport

Scores = Annotated[np.ndarray[Any, Any], modelport.Array["FP32", 2]]


class CountedText(TypedDict):
    text: str
    calls: int


@modelport.model(batch=8)
def score(text: list[str], bias: Annotated[Any, modelport.Array["FP32"]] = None) -> Scores:
    """The lengths of texts, and the size of the batch: a pause lets it grow."""
    time.sleep(0.05)
    for each in text:
        if each.startswith("refuse"):
            raise modelport.InvalidArgument(f"'{each}' is refused")
    found = np.array([[len(each), len(text)] for each in text], np.float32)
    return found if bias is None else found + bias[:, None]


@modelport.model
def act(code: str) -> Scores:
    """The value of ``code``."""
    found: dict[str, Any] = {"np": np, "os": os, "modelport": modelport}
    return eval(code, found)  # type: ignore[no-any-return]


@modelport.model(name="calls counted")
class CallCounter:
    def load(self) -> None:
        self.calls = 0

    def is_ready(self) -> bool:
        return self.calls < 3

    def predict(self, text: str) -> CountedText:
        self.calls += 1
        return {"text": text.upper(), "calls": self.calls}

    def unload(self) -> None:
        print(f"unloaded after {self.calls} calls")


@modelport.model
class Meeting:
    """Two requests that wait for each other."""

    def load(self) -> None:
        self.arrived = 0
        self.all = asyncio.Event()

    async def predict(self, model: str) -> Scores:
        self.arrived += 1
        if self.arrived == 2:
            self.all.set()
        await self.all.wait()
        found = await modelport.infer_async(
            model, {"text": [["abc"]], "bias": np.ones((1, 1), np.float32)}
        )
        return found["output"][0]


@modelport.model
class Patient:
    def load(self) -> None:
        self.cancelled = 0

    async def predict(self, seconds: float) -> int:
        """The number of earlier requests that were cancelled."""
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.cancelled


@modelport.model
def words(text: str) -> Iterator[str]:
    for word in text.split():
        if word == "never":
            raise modelport.Unsupported("never say never")
        yield word


@modelport.model(name="characters")
class Characters:
    def load(self) -> None:
        self.made = 0

    async def predict(self, text: str, times: int = 1) -> AsyncIterator[str]:
        """Each character several times; for ``?``, the number of those before."""
        for each in text:
            await asyncio.sleep(0)
            self.made += 1
            yield str(self.made) if each == "?" else each * times
