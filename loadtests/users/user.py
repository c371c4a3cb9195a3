"""Locust's users, one class for each dialect; what they do is in ``conductor``."""

from __future__ import annotations

import contextlib
from typing import ClassVar

from locust import User, task
from locust.exception import StopUser

from loadtests.target import Protocol
from loadtests.users.client import Client, Unanswered
from loadtests.users.conductor import Conductor, Lane


class ModelUser(User):
    """Asks one target of the running load, one request at a time."""

    abstract = True
    protocol: ClassVar[Protocol]
    #: Set by the locustfile before any user starts.
    conductor: ClassVar[Conductor]
    #: None: there is no load.
    lane: ClassVar[Lane | None] = None
    _client: Client | None = None
    _number = 0

    def on_start(self) -> None:
        if self.lane is None:
            return
        client = self.lane.client(self.conductor.load.timeout_seconds)
        with contextlib.suppress(Unanswered):  # counted when it asks
            client.connect()
        self._client = client
        self._number = self.conductor.join(self.lane)

    @task
    def ask(self) -> None:
        """All of the load, not one request: Locust's own loop costs more than many an answer."""
        if self.lane is None or self._client is None:
            raise StopUser
        try:
            self.conductor.drive(self.lane, self._number, self._client)
        except Exception as error:  # Locust would run the task again, and nobody would know
            self.conductor.fail(f"unexpected {type(error).__name__}: {error}")
        raise StopUser

    def on_stop(self) -> None:
        if self._client is not None:
            self._client.close()


class OipHttpUser(ModelUser):
    protocol = Protocol.OIP_HTTP


class OipHttpBinaryUser(ModelUser):
    protocol = Protocol.OIP_HTTP_BINARY


class OipGrpcUser(ModelUser):
    protocol = Protocol.OIP_GRPC


class TfServingHttpUser(ModelUser):
    protocol = Protocol.TFSERVING_HTTP


class TfServingGrpcUser(ModelUser):
    protocol = Protocol.TFSERVING_GRPC


class TorchServeHttpUser(ModelUser):
    protocol = Protocol.TORCHSERVE_HTTP


class TorchServeGrpcUser(ModelUser):
    protocol = Protocol.TORCHSERVE_GRPC


class TritonHttpUser(ModelUser):
    protocol = Protocol.TRITON_HTTP


class TritonGrpcUser(ModelUser):
    protocol = Protocol.TRITON_GRPC


USERS: dict[Protocol, type[ModelUser]] = {
    one.protocol: one
    for one in (
        OipHttpUser,
        OipHttpBinaryUser,
        OipGrpcUser,
        TfServingHttpUser,
        TfServingGrpcUser,
        TorchServeHttpUser,
        TorchServeGrpcUser,
        TritonHttpUser,
        TritonGrpcUser,
    )
}
