"""The same in Azure's and Google's storage: real clients against Azurite and a GCS emulator.

Behind ``make storage``: it needs the extras ``azure`` and ``gcs``, ``gcp-storage-emulator`` from
PyPI, and Node with ``azurite`` (on PATH, or by ``npx``).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelport.exporters.publishing import publish
from modelport.gateway.errors import AlreadyExists, InvalidArgument, Unavailable
from modelport.gateway.repository import config, manifest
from modelport.gateway.repository.storage import complete_versions
from modelport.gateway.repository.storage import objects as storage
from modelport.gateway.repository.storage.location import Location, parse
from modelport.gateway.repository.storage.mirror import Mirror
from modelport.gateway.repository.storage.objects import ObjectStore
from modelport.gateway.types import Datatype, ModelSignature, TensorSpec

START_SECONDS = 90.0
#: Azurite's, known to everybody.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("MODELPORT_SLOW_TESTS"), reason="make storage runs these"
    ),
    pytest.mark.filterwarnings("ignore"),  # of the libraries
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def running(port: int, *command: str, folder: Path) -> Iterator[None]:
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            assert process.poll() is None, "the emulator has ended"
            assert time.monotonic() < deadline, "the emulator does not listen"
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(params=["az", "gs"])
def location(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Location]:
    """An empty folder in a bucket of the emulator."""
    port, scheme = free_port(), request.param
    library = {"az": "adlfs", "gs": "gcsfs"}[scheme]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if scheme == "az":
        azurite = [shutil.which("azurite") or "npx", "--yes", "azurite@3.34.0"]
        azurite = azurite[:1] if azurite[0] != "npx" else azurite
        command = [*azurite, "--silent", "--inMemoryPersistence", "--skipApiVersionCheck"]
        for service in ("blob", "queue", "table"):
            command += [f"--{service}Port", str(port if service == "blob" else free_port())]
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        monkeypatch.setenv(
            "AZURE_STORAGE_CONNECTION_STRING",
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint={endpoint};",
        )
    else:
        command = [sys.executable, "-c", "from gcp_storage_emulator.__main__ import main; main()"]
        command += ["start", "--host=127.0.0.1", f"--port={port}", "--in-memory"]
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    with running(port, *command, folder=tmp_path):
        filesystem = ObjectStore(parse(f"{scheme}://models/p"))._filesystem
        asyncio.run_coroutine_threadsafe(filesystem._mkdir("models"), filesystem.loop).result(30)
        yield parse(f"{scheme}://models/some/prefix")
        type(filesystem).clear_instance_cache()  # the next emulator has another port


def put(location: Location, version: int | None = None, content: bytes = b"onnx") -> int:
    tensor = TensorSpec("x", Datatype.FP32, (4,))
    wanted = config.build("m", config.PLATFORMS[0], ModelSignature((tensor,), (tensor,), 8))
    with publish.staging(location) as staged:
        (staged / "data").mkdir()
        (staged / "data" / "table").write_bytes(content * 100_000)
        (staged / "model.onnx").write_bytes(content)
        return publish.publish(staged, location, wanted, version).version


def test_versions_are_published_once_found_whole_fetched_followed_and_removed(
    location: Location, tmp_path: Path
) -> None:
    mirror = Mirror(location, tmp_path / "cache")
    assert mirror.look() == {}
    assert put(location) == 1
    assert put(location, content=b"two") == 2
    with pytest.raises(AlreadyExists):
        put(location, 2)
    found = mirror.look()["m"]
    assert [*found.versions] == [1, 2]
    for entry in found.versions.values():
        assert entry.fetch is not None
        entry.fetch()
        assert manifest.verify(entry.path)
    assert mirror.look()["m"] == found
    objects = ObjectStore(location)
    assert objects.create("m/3/" + complete_versions.CLAIM, b"mine")
    if location.scheme != "gs":  # its emulator takes no notice of ifGenerationMatch
        assert not objects.create("m/3/" + complete_versions.CLAIM, b"another's")
    objects.delete(["m/2/manifest.json", "m/2/nothing"])
    objects.delete(f"m/1/{name}" for name in objects.listing("m/1"))
    assert objects.listing("m/1") == {}
    assert put(location) == 4
    assert [*mirror.look()["m"].versions] == [2, 4]  # of 2 the last look's stays until it is gone
    assert not (mirror.folder / "m" / "1").exists()
    with pytest.raises(InvalidArgument, match="no such bucket"):
        Mirror(Location(location.scheme, "nowhere"), tmp_path).look()


def test_unavailable_storage_is_reported_in_time(
    location: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "LIST_SECONDS", 5.0)  # Azure's library tries for longer
    os.environ[
        "AZURE_STORAGE_CONNECTION_STRING" if location.scheme == "az" else "STORAGE_EMULATOR_HOST"
    ] = (
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
        f"BlobEndpoint=http://127.0.0.1:{free_port()}/{ACCOUNT};"
        if location.scheme == "az"
        else f"http://127.0.0.1:{free_port()}"
    )
    type(ObjectStore(location)._filesystem).clear_instance_cache()
    with pytest.raises(Unavailable):
        Mirror(location, tmp_path).look()
