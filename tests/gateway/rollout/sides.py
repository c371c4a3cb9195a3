"""A model with two versions whose backends do what a test says, and its rollouts."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from modelport.gateway.backends.base import Artifact, Execution
from modelport.gateway.models.inference_service import InferenceService
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.models.model import ServedVersion
from modelport.gateway.repository import config as configuration
from modelport.gateway.rollout.plan import RolloutPlan, RolloutSide
from modelport.gateway.rollout.statistics.counts import StageCounts
from modelport.gateway.rollout.traffic.rollouts import Rollouts
from modelport.gateway.settings import ModelControlMode, Settings
from modelport.gateway.types import (
    NO_DEADLINE,
    Datatype,
    Deadline,
    InferRequest,
    InferResponse,
    Tensor,
    finished,
)

CONFIG = """
backend: "sided"
max_batch_size: 4
version_policy { all {} }
input { name: "x" data_type: TYPE_FP32 dims: 2 }
output { name: "y" data_type: TYPE_FP32 dims: 2 label_filename: "labels.txt" }
"""
Answer = Callable[[InferRequest], Awaitable[InferResponse]]
PLAN = RolloutPlan(
    "0" * 32, "m", RolloutSide("m", 1), RolloutSide("m", 2), default_version=1, pair=0.0
)


def times(factor: float) -> Answer:
    async def answer(request: InferRequest) -> InferResponse:
        data = request.inputs[0].data * np.float32(factor)
        return InferResponse("m", 0, [Tensor("y", Datatype.FP32, data)])

    return answer


async def never(_: InferRequest) -> InferResponse:
    await asyncio.Event().wait()
    raise AssertionError


def failing(error: Exception) -> Answer:
    async def answer(_: InferRequest) -> InferResponse:
        raise error

    return answer


class Sided:
    """The backend of one version."""

    problem = ""
    execution = Execution()

    def __init__(self, config: Any, answer: Answer) -> None:
        self.config = config
        self.answer = answer
        self.asked: list[InferRequest] = []

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        self.asked.append(request)
        return await self.answer(request)

    def unload(self) -> None: ...


class Sides:
    """The model ``m``: version 1 doubles and is the default, version 2 is scripted."""

    def __init__(self, manager: ModelManager) -> None:
        self.manager = manager
        self.service = InferenceService(manager)
        self.rollouts = Rollouts(self.service)
        self.baseline, self.candidate = (backend_of(manager.get("m", n)) for n in (1, 2))
        self.plan = PLAN

    def apply(
        self,
        share: float,
        kind: str = "canary",
        stage: int = 0,
        until: float | None = None,
        **plan: Any,
    ) -> None:
        if (changed := replace(self.plan, **plan)) != self.plan:
            content = repr(replace(changed, id=PLAN.id))
            self.plan = replace(changed, id=uuid.uuid5(uuid.NAMESPACE_OID, content).hex)
        document = {
            "model": "m", "plan": self.plan.to_json(), "stage": stage, "kind": kind,
            "share": share, "revision": 1, "until": until,
        }  # fmt: skip
        self.rollouts.apply(document)

    def counts(self, stage: int = 0) -> StageCounts:
        document = self.rollouts.counts()[self.plan.id]["stages"][str(stage)]
        return StageCounts.from_json(document)

    def problem(self) -> str:
        found: str = self.rollouts.counts()[self.plan.id]["problem"]
        return found

    async def ask(
        self,
        *values: float,
        deadline: Deadline = NO_DEADLINE,
        step: bool = False,
        **rest: Any,
    ) -> Any:
        data = np.array([values or (1, 2)], np.float32)
        request = InferRequest("m", [Tensor("x", Datatype.FP32, data)], **rest)
        response = await finished(self.rollouts.infer(request, deadline, step))
        await asyncio.sleep(0)  # a copy is sent after the response
        return response


def backend_of(version: ServedVersion) -> Sided:
    assert isinstance(version.backend, Sided)
    return version.backend


async def sides(folder: Path, answer: Answer, config: str = CONFIG) -> Sides:
    answers = {1: times(2), 2: answer}
    for number in answers:
        (folder / "m" / str(number)).mkdir(parents=True)
    (folder / "m" / "config.pbtxt").write_text(config)
    (folder / "m" / "labels.txt").write_text("cat\ndog\n")

    def load(artifact: Artifact) -> Sided:
        return Sided(configuration.complete(artifact.config, "m"), answers[artifact.version])

    manager = ModelManager(Settings((folder,), ModelControlMode.EXPLICIT), lambda _: load)
    await manager.start()
    await manager.load("m")
    manager.set_default("m", 1)
    return Sides(manager)
