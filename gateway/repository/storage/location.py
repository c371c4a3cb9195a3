"""Where a repository in object storage is, as Triton's users write it:

    s3://bucket/prefix    s3://host:port/bucket/prefix    s3://https://host:port/bucket/prefix
    gs://bucket/prefix    az://container/prefix

A URL never holds credentials: they would be seen in lists of processes, and in logs. They come from
the environment, or from wherever the provider's own chain of defaults looks.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from modelport.gateway.errors import InvalidArgument, ModelportError

SCHEMES = ("s3", "gs", "az")
#: What file systems take for a name.
MAX_SEGMENT_BYTES = 255
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ENDPOINT = re.compile(r"(?:(https?)://)?([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})/")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")


@dataclass(frozen=True, slots=True)
class Location:
    """A folder in a bucket. ``endpoint`` is empty or ``http[s]://host:port``, of S3 alone."""

    scheme: str
    bucket: str
    prefix: str = ""
    endpoint: str = ""

    def __str__(self) -> str:
        endpoint = f"{self.endpoint.removeprefix('http://')}/" if self.endpoint else ""
        return f"{self.scheme}://{endpoint}{self.path}"

    def __truediv__(self, name: str) -> Location:
        return replace(self, prefix=f"{self.prefix}/{name}" if self.prefix else name)

    @property
    def path(self) -> str:
        """As fsspec names it."""
        return f"{self.bucket}/{self.prefix}" if self.prefix else self.bucket


def is_url(text: str) -> bool:
    return _SCHEME.match(text) is not None


def parse(text: str) -> Location:
    """The location that a URL names.

    Raises:
        InvalidArgument: it names none. The message does not repeat what may be a secret.
    """
    match = _SCHEME.match(text)
    scheme = match[1] if match else ""
    if match is None or scheme not in SCHEMES:
        raise InvalidArgument(f"'{scheme}://' is no storage; use s3://, gs://, az:// or a folder")
    rest = text[match.end() :]
    inner = re.match(r"https?://", rest)
    authority = rest[inner.end() if inner else 0 :].partition("/")[0]
    if "@" in authority or "?" in rest or "#" in rest:
        raise InvalidArgument(
            f"a {scheme}:// URL with credentials or a query is refused; leave them to the "
            "environment, or to where the provider's tools look for them"
        )
    endpoint = ""
    server = _ENDPOINT.match(rest)
    if server is not None and scheme == "s3":
        endpoint = f"{server[1] or 'http'}://{server[2]}:{server[3]}"
        rest = rest[server.end() :]
    bucket, *segments = rest.rstrip("/").split("/")
    if not _BUCKET.fullmatch(bucket):
        raise InvalidArgument(
            f"the {scheme}:// URL names no bucket; write {scheme}://BUCKET/PREFIX"
        )
    if not all(is_segment(segment) for segment in segments):
        raise InvalidArgument(
            f"the path of the {scheme}:// URL has an empty part, '.', '..' or one that is no text"
        )
    return Location(scheme, bucket, "/".join(segments), endpoint)


def is_segment(name: str) -> bool:
    """Whether ``name`` may be a file's: an object's key may be anything."""
    if name in ("", ".", "..") or "\\" in name or not name.isprintable():
        return False
    return len(name.encode()) <= MAX_SEGMENT_BYTES


def server_of(location: Location) -> str:
    """What the environment says of where ``location`` is: the same name may mean two buckets."""
    variables = {
        "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        "gs": ("STORAGE_EMULATOR_HOST",),
        "az": ("AZURE_STORAGE_ACCOUNT_NAME",),
    }
    return next(filter(None, (os.environ.get(name) for name in variables[location.scheme])), "")


class Repository(click.ParamType):  # type: ignore[type-arg]  # of newer releases of click
    """An option's value: a ``Location`` if it is a URL, else a ``Path``."""

    name = "repository"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "DIR|URL"

    def convert(self, value: Any, param: Any, ctx: Any) -> Path | Location:
        if isinstance(value, Path | Location):
            return value
        try:
            return parse(value) if is_url(value) else Path(value)
        except ModelportError as error:
            self.fail(str(error), param, ctx)
