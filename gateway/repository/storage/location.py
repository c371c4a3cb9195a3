"""The location of a repository in object storage, in Triton's notation:

    s3://bucket/prefix    s3://host:port/bucket/prefix    s3://https://host:port/bucket/prefix
    gs://bucket/prefix    az://container/prefix

A URL never contains credentials, because they would show in process lists and logs. They come from
the environment, or from the provider's own chain of defaults.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from modelport.gateway.errors import InvalidArgument, ModelportError

SCHEMES = ("s3", "gs", "az")
#: The limit of common file systems.
MAX_SEGMENT_BYTES = 255
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ENDPOINT = re.compile(r"(?:(https?)://)?([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})/")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")


@dataclass(frozen=True, slots=True)
class Location:
    """A folder in a bucket. ``endpoint`` is empty or ``http[s]://host:port``, only for S3."""

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
        """The path in fsspec's notation."""
        return f"{self.bucket}/{self.prefix}" if self.prefix else self.bucket


def is_url(text: str) -> bool:
    return _SCHEME.match(text) is not None


def parse(text: str) -> Location:
    """Parse a URL.

    Raises:
        InvalidArgument: the URL is invalid. The message does not repeat possible secrets.
    """
    match = _SCHEME.match(text)
    scheme = match[1] if match else ""
    if match is None or scheme not in SCHEMES:
        raise InvalidArgument(
            f"'{scheme}://' is not supported; use s3://, gs://, az:// or a folder"
        )
    rest = text[match.end() :]
    inner = re.match(r"https?://", rest)
    authority = rest[inner.end() if inner else 0 :].partition("/")[0]
    if "@" in authority or "?" in rest or "#" in rest:
        raise InvalidArgument(
            f"a {scheme}:// URL must not contain credentials or a query; set them in the "
            "environment, or where the provider's tools look for them"
        )
    endpoint = ""
    server = _ENDPOINT.match(rest)
    if server is not None and scheme == "s3":
        endpoint = f"{server[1] or 'http'}://{server[2]}:{server[3]}"
        rest = rest[server.end() :]
    bucket, *segments = rest.rstrip("/").split("/")
    if not _BUCKET.fullmatch(bucket):
        raise InvalidArgument(f"the {scheme}:// URL has no bucket; write {scheme}://BUCKET/PREFIX")
    if not all(is_segment(segment) for segment in segments):
        raise InvalidArgument(
            f"the path of the {scheme}:// URL has an empty, '.', '..' or unprintable part"
        )
    return Location(scheme, bucket, "/".join(segments), endpoint)


def is_segment(name: str) -> bool:
    """Whether ``name`` is a valid file name; an object's key may be anything."""
    if name in ("", ".", "..") or not name.isprintable() or "/" in name or "\\" in name:
        return False
    return len(name.encode()) <= MAX_SEGMENT_BYTES


def server_of(location: Location) -> str:
    """The endpoint from the environment, because the same URL may mean different buckets."""
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

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]
