"""Locust's user classes, one for each protocol; ``load_driver`` runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import ClassVar

from locust import User, task
from locust.exception import StopUser

from modelport.loadtests.load.target import LoadTestProtocol
from modelport.loadtests.users.client import DialectClient, Unanswered
from modelport.loadtests.users.load_driver import LoadDriver, TargetLoad


class ModelUser(User):
    """A user of one target, or of several in turn, with one request at a time."""

    abstract = True
    #: Set by the locustfile before any user starts.
    driver: ClassVar[LoadDriver]
    #: Empty: there is no load.
    target_loads: ClassVar[tuple[TargetLoad, ...]] = ()
    _clients: Sequence[tuple[TargetLoad, DialectClient]] = ()
    _number = 0

    def on_start(self) -> None:
        if not self.target_loads:
            return
        timeout_seconds = self.driver.load.timeout_seconds
        self._clients = [
            (target_load, target_load.client(timeout_seconds)) for target_load in self.target_loads
        ]
        for _, client in self._clients:
            with contextlib.suppress(Unanswered):  # counted with its first request
                client.connect()
        self._number = self.driver.join(self.target_loads[0])

    @task
    def ask(self) -> None:
        """Run the whole load, because Locust's own loop costs more than many answers."""
        if not self._clients:
            raise StopUser
        try:
            self.driver.drive(self._number, self._clients)
        except Exception as error:  # Locust would silently run the task again
            self.driver.fail(f"unexpected {type(error).__name__}: {error}")
        raise StopUser

    def on_stop(self) -> None:
        for _, client in self._clients:
            client.close()


#: The names of the classes, by which Locust's command line and web page choose them.
NAMES = {
    LoadTestProtocol.OIP_HTTP: "OipHttpUser",
    LoadTestProtocol.OIP_HTTP2: "OipHttp2User",
    LoadTestProtocol.OIP_HTTP_BINARY: "OipHttpBinaryUser",
    LoadTestProtocol.OIP_GRPC: "OipGrpcUser",
    LoadTestProtocol.TFSERVING_HTTP: "TfServingHttpUser",
    LoadTestProtocol.TFSERVING_GRPC: "TfServingGrpcUser",
    LoadTestProtocol.TORCHSERVE_HTTP: "TorchServeHttpUser",
    LoadTestProtocol.TORCHSERVE_GRPC: "TorchServeGrpcUser",
    LoadTestProtocol.TRITON_HTTP: "TritonHttpUser",
    LoadTestProtocol.TRITON_GRPC: "TritonGrpcUser",
}
USERS: dict[LoadTestProtocol, type[ModelUser]] = {
    protocol: type(name, (ModelUser,), {"__doc__": f"A user in {protocol}."})
    for protocol, name in NAMES.items()
}
