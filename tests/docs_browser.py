"""Part of ``make report-browser``: the page ``GET /docs`` of a real gateway in headless Chromium.

Swagger UI must show every operation and "Try it out" must get an answer, while each request stays
with the gateway and the console stays empty. That a request that leaves, a foreign script and a
changed file are seen or stopped is proven first.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, Route, sync_playwright

from tests import models
from tests.loadtests.report_browser import ARGUMENTS
from tests.server import Gateway, serving

ROW = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [[1, 2, 3, 4]]}]}


@contextmanager
def opened(
    browser: Browser, gateway: Gateway, change: str = ""
) -> Iterator[tuple[Page, list[str]]]:
    """The page, and what went wrong on it; ``change`` is added to Swagger UI's script."""
    page, problems = browser.new_page(), []
    page.on("console", lambda message: problems.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))

    def pass_on(route: Route) -> None:
        if not route.request.url.startswith((f"http://{gateway.http}/", "data:")):
            problems.append(f"leaves: {route.request.url}")
            route.abort()
        elif change and route.request.url.endswith("bundle.js"):
            reply = route.fetch()
            route.fulfill(response=reply, body=reply.text() + change)
        else:
            route.continue_()

    page.route("**/*", pass_on)
    page.goto(f"http://{gateway.http}/docs", wait_until="networkidle")
    yield page, problems
    page.close()


def check(browser: Browser, gateway: Gateway) -> list[str]:
    """The faults of the page."""
    with opened(browser, gateway) as (page, problems):
        document = page.evaluate("fetch('/openapi.json').then(reply => reply.json())")
        wanted = sum(len(methods) for methods in document["paths"].values())
        shown = page.locator(".opblock").count()
        if shown != wanted:
            problems.append(f"{shown} of {wanted} operations are shown")
        infer = page.locator(".opblock", has=page.locator("[data-path='/v2/models/{model}/infer']"))
        infer.locator(".opblock-summary-control").first.click()
        infer.get_by_role("button", name="Try it out").click()
        infer.get_by_placeholder("model").fill("x2")
        infer.locator("textarea.body-param__text").fill(json.dumps(ROW))
        infer.get_by_role("button", name="Execute").click()
        answer = infer.locator(".live-responses-table .response").first
        answer.wait_for()
        if "200" not in answer.inner_text() or '"x2"' not in answer.inner_text():
            problems.append(f"'Try it out' answers {answer.inner_text()[:200]!r}")
        return problems


def unseen(browser: Browser, gateway: Gateway) -> list[str]:
    """The attacks that neither the policy stops nor ``opened`` sees."""
    attacks = {
        "a request": "fetch('https://example.com/')",
        "a script": "document.body.append(Object.assign(document.createElement('script'), "
        "{src: 'https://example.com/x.js'}))",
        "an inline script": "document.body.append(Object.assign(document.createElement('script'), "
        "{text: 'window.ran = 1'}))",
        "code in a string": "setTimeout('window.ran = 1')",
        "a frame": "document.body.append(Object.assign(document.createElement('iframe'), "
        "{src: 'https://example.com/'}))",
    }
    found = []
    for name, attack in attacks.items():
        with opened(browser, gateway) as (page, problems):
            page.evaluate(f"() => {{ {attack} }}")
            page.wait_for_timeout(300)
            if not problems or page.evaluate("window.ran"):
                found.append(f"{name} passed")
    with opened(browser, gateway, change="window.ran = 1") as (page, problems):
        if page.evaluate("window.ran") or not any("integrity" in text for text in problems):
            found.append("a changed file ran")
    return found


def main() -> int:
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(models.repository(Path(folder))) as gateway,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=list(ARGUMENTS)
        )
        problems = unseen(browser, gateway) + check(browser, gateway)
    for problem in problems:
        print(f"/docs: {problem}", file=sys.stderr)
    if not problems:
        print("/docs: shown, answers, and asks nobody else")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
