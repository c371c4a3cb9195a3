"""``GET /docs``: Swagger UI from the package alone, under a policy that keeps other scripts out."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest

from modelport.gateway.protocols import api_pages
from tests import models
from tests.conformance import wire
from tests.server import Gateway, serving

ROOT = Path(__file__).parents[3]


class PageLoads(HTMLParser):
    """The tags of a page that load something, and its inline scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[dict[str, str | None]] = []
        self.inline: list[str] = []
        self._in_script = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self._in_script = tag == "script" and "src" not in found
        if ("src" in found or tag == "link") and not str(found.get("href")).startswith("data:"):
            self.tags.append(found)

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.inline.append(data)


def digest(algorithm: str, content: bytes) -> str:
    return f"{algorithm}-{base64.b64encode(hashlib.new(algorithm, content).digest()).decode()}"


def unpinned(html: str, policy: str, content: dict[str, bytes]) -> list[str]:
    """List what a page loads that its text does not fix; ``content``: of the server, by path."""
    loads, found = PageLoads(html), []
    for tag in loads.tags:
        place = tag.get("src") or tag.get("href") or ""
        target = urlsplit(urljoin("http://gateway/docs", place))
        if target.netloc != "gateway":
            found.append(f"{place} is of another server")
        elif tag.get("integrity") != digest("sha384", content.get(target.path, b"")):
            found.append(f"{place} may be any content")
    hashes = [digest("sha256", script.encode()) for script in loads.inline]
    return found + [
        f"a script that the policy does not name: {h}" for h in hashes if h not in policy
    ]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with serving(models.repository(tmp_path_factory.mktemp("models"))) as running:
        yield running


def test_the_page_loads_only_what_the_package_has_and_the_browser_can_check(
    gateway: Gateway,
) -> None:
    page = wire.send(gateway.http, "GET", "/docs")
    policy = page.headers["content-security-policy"]
    directives = dict(part.split(maxsplit=1) for part in policy.split("; "))
    assert directives["default-src"] == directives["base-uri"] == "'none'"
    assert directives["connect-src"] == "'self'"
    assert directives["frame-ancestors"] == "'none'"
    assert not re.search(r"unsafe|\*|http|data:", directives["script-src"])
    content = {}
    for name, (media_type, _) in api_pages.FILES.items():
        path = f"/docs/{api_pages.VERSION}/{name}"
        reply = wire.send(gateway.http, "GET", path)
        assert (reply.status, reply.headers["content-type"]) == (200, media_type)
        assert reply.headers["x-content-type-options"] == "nosniff"
        content[path] = reply.body
    html = page.body.decode()
    assert page.headers["x-content-type-options"] == "nosniff"
    assert len(PageLoads(html).tags) == len(content) == 2
    assert len(PageLoads(html).inline) == 1
    assert unpinned(html, policy, content) == []


@pytest.mark.parametrize(
    "other",
    [
        '<script src="https://cdn.example/swagger-ui.js" integrity="sha384-x"></script>',
        '<script src="//cdn.example/swagger-ui.js"></script>',
        '<script src="docs/x.js"></script>',
        '<link rel="stylesheet" href="docs/x.css" integrity="sha384-x">',
        "<script>fetch('/v2')</script>",
    ],
)
def test_a_page_that_loads_anything_else_is_found(other: str) -> None:
    assert len(unpinned(f"<html>{other}</html>", "script-src 'self'", {})) == 1


def test_no_page_of_the_other_documentation_is_left(gateway: Gateway) -> None:
    assert wire.send(gateway.http, "GET", "/redoc").status == 404


def test_the_pinned_files_are_those_that_the_fetching_script_pins() -> None:
    script = (ROOT / ".ci" / "swagger_ui.py").read_text()
    assert f'VERSION = "{api_pages.VERSION}"' in script
