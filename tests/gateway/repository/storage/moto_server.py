"""moto's S3 server in a process of its own, on a port that the system chose."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from modelport.gateway.repository.scan import ModelEntry
from modelport.gateway.repository.storage.location import Location, parse

BUCKET = "models"
#: What nobody may ever see.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIAMARKEDKEYMARKED0",
    "AWS_SECRET_ACCESS_KEY": "marked-secret-marked-secret-marked-secret",
    "AWS_SESSION_TOKEN": "marked-token-marked-token-marked-token",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_SERVER = """
import os, sys, threading
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer
# S3 compares and writes in one operation; moto serves each request in a thread and does it in two.
writing, put_object = threading.Lock(), S3Response.put_object
def put_alone(response):
    with writing:
        return put_object(response)
S3Response.put_object = put_alone
# Before anybody can ask: a storage without its bucket is another fault than one that is down.
s3_backends[DEFAULT_ACCOUNT_ID]["aws"].create_bucket(sys.argv[2], "us-east-1")
server = ThreadedMotoServer("127.0.0.1", int(sys.argv[1]), verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # until whoever started this ends
os._exit(0)
"""


class Moto:
    """A running server. ``requests`` is what it was asked, one line each."""

    def __init__(self, log: Path, port: int = 0) -> None:
        self.log = log
        with log.open("w") as written:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SERVER, str(port), BUCKET],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=written,
                text=True,
            )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        import boto3  # not for every test of the gateway

        self.client: Any = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, prefix: str) -> str:
        return f"s3://127.0.0.1:{self.port}/{BUCKET}/{prefix}"

    def location(self, prefix: str) -> Location:
        return parse(self.url(prefix))

    def requests(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if "HTTP/1.1" in line]

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def delete(self, *keys: str) -> None:
        for key in keys:
            self.client.delete_object(Bucket=BUCKET, Key=key)

    def keys(self, prefix: str) -> list[str]:
        """The keys below ``prefix/``, relative to it."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=BUCKET, Prefix=f"{prefix}/"
        )
        return [
            each["Key"].removeprefix(f"{prefix}/")
            for page in pages
            for each in page.get("Contents", ())
        ]

    def upload(self, folder: Path, prefix: str, names: Iterable[str] | None = None) -> None:
        """The files of ``folder``, or those named, in that order."""
        if names is None:
            names = sorted(
                path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
            )
        for name in names:
            self.put(f"{prefix}/{name}", (folder / name).read_bytes())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.client.close()


def fetch(found: dict[str, ModelEntry], number: int = 1, name: str = "m") -> Path:
    """Have a version here; its folder."""
    entry = found[name].versions[number]
    assert entry.fetch is not None
    entry.fetch()
    return entry.path
