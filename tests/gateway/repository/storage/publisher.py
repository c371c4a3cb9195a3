"""A publisher in a process of its own, which the tests kill.

    python -m …storage.publisher URL MODEL COUNT SIZE_BYTES [DIE_AT before|after]
    python -m …storage.publisher URL FIRST

Publishes COUNT versions and prints the number of each. With ``DIE_AT`` it sends itself SIGKILL
right before, or right after, its call number ``DIE_AT`` that changes the storage; exit status 0
says that there were not so many. The second publishes 4 MiB versions of ``x2``, each of which
multiplies by its own number, from ``FIRST`` on without end, and prints a number before and after.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from typing import Any

from modelport.exporters.publishing import publish
from modelport.gateway.repository import config
from modelport.gateway.repository.storage.location import Location, parse
from modelport.gateway.repository.storage.objects import ObjectStore
from modelport.gateway.types import Datatype, ModelSignature, TensorSpec
from tests import models

CHANGES = ("create", "upload", "delete")


def wanted(name: str) -> config.ModelConfig:
    tensor = TensorSpec("x", Datatype.FP32, (4,))
    return config.build(name, config.PLATFORMS[0], ModelSignature((tensor,), (tensor,), 8))


def _connect(location: Location) -> None:
    """Import the storage's client and ask it once, so that a later kill hits a publication."""
    ObjectStore(location).listing()


def multiplying(url: str, first: int) -> None:
    location, config_of = parse(url), config.parse(models.X2_CONFIG)
    _connect(location)
    for number in itertools.count(first):
        with publish.staging(location) as staged:
            models.weighty(staged / "model.onnx", float(number))
            print(number, flush=True)
            publish.publish(staged, location, config_of, number)
        print(number, flush=True)


def main() -> None:
    if len(sys.argv) == 3:
        multiplying(sys.argv[1], int(sys.argv[2]))
    url, model, count, size, *death = sys.argv[1:]
    if death:
        _die(int(death[0]), death[1] == "before")
    location = parse(url)
    _connect(location)
    print("ready", flush=True)
    for _ in range(int(count)):
        with publish.staging(location) as staged:
            (staged / "model.onnx").write_bytes(os.urandom(int(size)))
            (staged / "certificate.json").write_text("{}")
            (staged.parent / "labels.txt").write_text("cat\n")
            done = publish.publish(staged, location, wanted(model), None)
        print(done.version, flush=True)


def _die(at: int, before: bool) -> None:
    calls = 0

    def dying(change: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = change(*arguments)
            if calls == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in CHANGES:
        setattr(ObjectStore, name, dying(getattr(ObjectStore, name)))


if __name__ == "__main__":
    main()
