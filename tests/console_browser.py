"""``make console``: the console of real gateways in headless Chromium, without a network.

    python -m tests.console_browser [--pictures FOLDER]

Every view is opened wide and narrow, light and dark, and axe looks at it. Every action is done:
call a model with each kind of input, load, unload, command a rollout, give a credential. Names,
labels and reasons are hostile; no script of theirs may run, and no request may leave the gateway.
Then come a proxy with a prefix, a reader without authority, and 1,000 models that change 50 times a
second. That a foreign script is stopped and that axe finds a fault is proven first.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote

from playwright.sync_api import Browser, Error, Page, Route, expect, sync_playwright

from modelport.gateway.access import api_key_file
from tests import models, verb
from tests.loadtests.report_browser import ARGUMENTS, SCHEMES, WIDTHS
from tests.server import Gateway, serving

AXE = "axe-core@4.14.1"
#: Of the archive, as the registry states it: npm view axe-core@VERSION dist.integrity
AXE_INTEGRITY = (
    "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASy"
    "FNNtuFooJpZe37OgudVGtQ=="
)
#: What axe calls serious, and worse.
SERIOUS = ("serious", "critical")
HOSTILE = "<img src=x onerror=window.ran=1>"
HOSTILE_LABEL = "<svg onload=window.ran=2>‮"
#: Limits of the issue: milliseconds until the list is there, bytes over the wire, one frame.
FIRST_PAINT_MS, WIRE_BYTES, FRAME_MS = 1000, 300_000, 100
VIEWS = ("#/models", "#/models/x2", f"#/models/{quote(HOSTILE)}", "#/models/broken", "#/models/net",
         "#/rollouts", "#/rollouts/x2", "#/requests", "#/gateway", "#/nothing/%")  # fmt: skip
#: Views that are looked at until they have figures.
PATIENT = [
    (1280, "light", view) for view in ("#/models", "#/models/x2", "#/models/net", "#/rollouts/x2")
]
ROW = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
NET_ROW = {"inputs": [{**ROW["inputs"][0], "name": "features"}]}
#: A fifth of the answers disagree, which the limits allow, so the rollout stays in its first stage.
PLAN = {
    "candidate": "2", "baseline": 1, "shadow": 0.5, "steps": [0.5], "by": HOSTILE,
    "min_seconds": 600.0,
    "limits": {"max_disagreement": 0.5, "atol": 4.0, "max_p50_regression": 9.0,
               "max_p99_regression": 9.0},
}  # fmt: skip
#: Draws the list of 1,000 models, and changes it; returns the longest frames.
CHANGES = """async () => {
      const { modelList } = await import(new URL("console/models.js", document.baseURI));
      const list = modelList();
      document.getElementById("main").replaceChildren(list.element);
      const rows = Array.from({ length: 1000 }, (_, i) =>
        ({ name: `model-${i}`, version: "1", state: "READY" }));
      list.update(rows, new Map());
      await new Promise((wake) => setTimeout(wake, 1000));
      const frames = [];
      let last = performance.now(), running = true, updates = 0;
      const frame = (now) => {
        frames.push(now - last);
        last = now;
        if (running) requestAnimationFrame(frame);
      };
      requestAnimationFrame(frame);
      const keys = rows.map((row) => JSON.stringify([row.name, row.version]));
      const timer = setInterval(() => {
        updates += 1;
        list.update(rows, new Map(keys.map((key, i) =>
          [key, { rate: updates + i, errors: i, latency: updates * 10 + i, queue: updates }])));
      }, 20);
      await new Promise((wake) => setTimeout(wake, 5000));
      clearInterval(timer);
      running = false;
      frames.sort((one, other) => other - one);
      return { longest: frames.slice(0, 5), frames: frames.length, updates };
    }"""
ROUNDS = 3
RULES = """
[[rules]]
principals = ["reader"]
operations = ["metadata", "statistics", "metrics"]
[[rules]]
principals = ["owner"]
operations = "*"
[[quotas]]
principals = ["reader"]
requests_per_second = 5.0
[keys]
file = "keys.toml"
"""


def axe_source() -> str:
    """The script of axe, from its pinned archive."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", AXE], cwd=folder, check=True)
        (file,) = Path(folder).iterdir()
        archive = file.read_bytes()
    found = base64.b64encode(hashlib.sha512(archive).digest()).decode()
    if f"sha512-{found}" != AXE_INTEGRITY:
        sys.exit(f"{AXE} is not the archive that AXE_INTEGRITY names")
    with tarfile.open(fileobj=io.BytesIO(archive)) as package:
        script = package.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


#: Leaves redirections to the browser.
DIRECT = urllib.request.build_opener(_NoRedirect)


class Console:
    """A page of the console at ``url``; ``problems`` is what went wrong on it."""

    def __init__(
        self, browser: Browser, url: str, width: int = 1280, scheme: Any = "light"
    ) -> None:
        self.url, self.problems = url, list[str]()
        self.expected: tuple[str, ...] = ()
        self.page: Page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        self.wire_bytes = 0
        self.page.on("console", lambda message: self._said(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: dialog.accept())
        self.page.on("response", lambda response: self._count(response))
        self.page.route("**/*", self._gate)

    def _said(self, text: str) -> None:
        if not any(each in text for each in self.expected):
            self.problems.append(f"console: {text}")

    def _count(self, response: Any) -> None:
        self.wire_bytes += int(response.headers.get("content-length", 0))

    def _gate(self, route: Route) -> None:
        if route.request.url.startswith((f"{self.url}/", "blob:")):
            route.continue_()
            return
        self.problems.append(f"leaves: {route.request.url}")
        route.abort()

    def open(self, view: str = "#/models") -> Page:
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}/console{view}", wait_until="load")
        self.page.locator("main h1").wait_for()
        return self.page

    def check(self, what: str) -> None:
        if self.page.evaluate("window.ran"):
            self.problems.append(f"{what}: a script of a name ran")

    def end(self) -> list[str]:
        self.page.close()
        return self.problems


def ask(url: str, document: Any = None, token: str = "") -> Any:
    headers = {"content-type": "application/json"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    body = None if document is None else json.dumps(document).encode()
    request = urllib.request.Request(url, body, headers)
    with urllib.request.urlopen(request) as answer:
        content = answer.read()
    return json.loads(content) if content else None


def repository(folder: Path) -> Path:
    """Two versions of ``x2``, hostile and broken models, pictures and texts, and a proven one."""
    root = models.repository(folder / "repository")
    models.multiply(root / "x2" / "2" / "model.onnx", 2.1)
    labels = "".join(
        f'parameters {{ key: "version_label.{key}" value {{ string_value: "{number}" }} }}\n'
        for key, number in (("stable", 1), (HOSTILE_LABEL, 1))
    )
    (root / "x2" / "config.pbtxt").write_text(
        models.X2_CONFIG + "version_policy { all {} }\nresponse_cache { enable: true }\n" + labels
    )
    models.multiply(root / HOSTILE / "1" / "model.onnx")
    text = models.config(HOSTILE, ["x FP32 4"], ["y FP32 4"])
    (root / HOSTILE / "config.pbtxt").write_text(text)
    broken = root / "broken" / "1"
    broken.mkdir(parents=True)
    (broken / "model.onnx").write_bytes(b"<script>window.ran = 3</script>")
    models.flatten(root / "picture" / "1" / "model.onnx", (3, 2, 2))
    text = models.config("picture", ["x FP32 3,2,2"], ["y FP32 12"], extra=models.PICTURES)
    (root / "picture" / "config.pbtxt").write_text(text)
    models.identity(root / "words" / "1" / "model.onnx", "BYTES", ("batch", 1))
    (root / "words" / "config.pbtxt").write_text(
        models.config("words", ["x BYTES 1"], ["y BYTES 1"])
    )
    export(folder, root)
    return root


def export(folder: Path, root: Path) -> None:
    """Publish a model with its certificate."""
    (folder / "nets.py").write_text(
        "from torch import nn\n\nclass Net(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(nn.Linear(4, 3), nn.Softmax(-1))\n"
    )
    save = "import torch, nets; torch.save(nets.Net().state_dict(), 'net.pt')"
    subprocess.run([sys.executable, "-c", save], cwd=folder, check=True)
    command = [*(sys.executable, "-m", "modelport", "export", "net.pt", "--model", "nets:Net")]
    command += ["--name", "net", "--input", "features:FP32[4]", "--format", "onnx"]
    command += ["--repository", str(root)]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def traffic(gateway: Gateway) -> Iterator[None]:
    """Requests to the models, some of which fail, until the end."""
    ending = threading.Event()

    def send() -> None:
        number = 0
        while not ending.wait(0.01):
            number += 1
            with suppress(HTTPError, OSError):
                ask(f"http://{gateway.http}/v2/models/net/infer", NET_ROW)
            for model in ("x2", quote(HOSTILE), "absent" if number % 20 == 0 else "x2"):
                row = json.loads(json.dumps(ROW))
                row["inputs"][0]["data"][0] = number % 50
                with suppress(HTTPError, OSError):
                    ask(f"http://{gateway.http}/v2/models/{model}/infer", row)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    yield
    ending.set()
    thread.join()


@contextmanager
def prefixed(url: str, prefix: str) -> Iterator[str]:
    """A proxy that serves ``url`` below ``prefix``."""

    class PrefixProxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._pass()

        def do_POST(self) -> None:
            self._pass()

        def _pass(self) -> None:
            if not self.path.startswith(prefix + "/"):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("content-length", 0))) or None
            kept = {
                k: v
                for k, v in self.headers.items()
                if k.lower() in ("host", "origin", "content-type")
            }
            request = urllib.request.Request(
                url + self.path.removeprefix(prefix), body, kept, method=self.command
            )
            try:
                answer: Any = DIRECT.open(request)
            except HTTPError as error:
                answer = error
            content = answer.read()
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in ("content-length", "date", "connection"):
                    self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), PrefixProxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}{prefix}"
    server.shutdown()


def admin(gateway: Gateway) -> str:
    return gateway.metrics.removesuffix("/metrics")


# -- what is checked -------------------------------------------------------------------------------


def unseen(browser: Browser, url: str, axe: str) -> list[str]:
    """The attacks that neither the policy stops nor ``Console`` sees, and a fault unseen by axe."""
    attacks = {
        "a request": "fetch('https://example.com/')",
        "a script": "document.body.append(Object.assign(document.createElement('script'), "
        "{src: 'https://example.com/x.js'}))",
        "an inline script": "document.body.append(Object.assign(document.createElement('script'), "
        "{text: 'window.ran = 1'}))",
        "markup": "document.body.innerHTML = '<img src=x onerror=window.ran=1>'",
        "code in a string": "setTimeout('window.ran = 1')",
        "a style": "document.body.setAttribute('style', 'color: red')",
        "a frame": "document.body.append(Object.assign(document.createElement('iframe'), "
        "{src: 'https://example.com/'}))",
    }
    found = []
    for name, attack in attacks.items():
        console = Console(browser, url)
        page = console.open()
        page.evaluate(f"() => {{ try {{ {attack} }} catch (error) {{ console.error(error); }} }}")
        page.wait_for_timeout(300)
        if page.evaluate("window.ran") or not console.end():
            found.append(f"{name} passed")
    console = Console(browser, url)
    page = console.open()
    page.evaluate("document.querySelector('#filter').labels[0].remove()")
    if not look_with_axe(page, axe):
        found.append("axe did not find a field without a label")
    console.end()
    return found


def look_with_axe(page: Page, axe: str) -> list[str]:
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"axe: {each['id']} ({each['impact']}): {each['nodes'][0]['target']}"
        for each in found["violations"]
        if each["impact"] in SERIOUS
    ]


def looks(browser: Browser, url: str, axe: str, pictures: Path | None) -> list[str]:
    """The faults of every view, wide and narrow, light and dark."""
    found = []
    for width in WIDTHS:
        for scheme in SCHEMES:
            for view in VIEWS:
                console = Console(browser, url, width, scheme)
                console.expected = ("404",)
                page = console.open(view)
                figures = (width, scheme, view) in PATIENT
                page.wait_for_timeout(6500 if figures else 400)
                console.check(view)
                wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
                if wide > 0:
                    console.problems.append(f"the page is {wide} pixels wider than its window")
                console.problems += look_with_axe(page, axe)
                if pictures is not None:
                    name = view.strip("#/").split("/")
                    file = f"console-{name[0]}{'-one' if name[1:] else ''}-{width}-{scheme}.png"
                    page.screenshot(path=pictures / file)
                found += [f"{view} {width} {scheme}: {problem}" for problem in console.end()]
    return found


def first_paint(browser: Browser, url: str) -> list[str]:
    """Problems of size and speed: until the list of models is there."""
    console = Console(browser, url)
    started = time.perf_counter()
    page = console.open()
    page.locator("tbody tr").first.wait_for()
    shown_ms = 1000 * (time.perf_counter() - started)
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
    print(f"first paint {paint:.0f} ms, list {shown_ms:.0f} ms, {console.wire_bytes:,} bytes")
    if paint > FIRST_PAINT_MS:
        console.problems.append(f"first paint after {paint:.0f} ms")
    if console.wire_bytes > WIRE_BYTES:
        console.problems.append(f"{console.wire_bytes:,} bytes over the wire")
    return console.end()


def actions(browser: Browser, gateway: Gateway, folder: Path) -> list[str]:
    """Do everything that the page offers, by keyboard where it counts."""
    console = Console(browser, admin(gateway))
    console.expected = ("400", "404")  # a request that is no JSON, and no certificate
    page = console.open("#/models/x2")
    call = page.get_by_role("button", name="Call the model")
    answer = page.get_by_label("Answer")
    page.get_by_label("Request as JSON").fill(json.dumps(ROW))
    call.press("Enter")
    expect(answer).to_contain_text('"model_name": "x2"')
    page.get_by_text("The same call as curl and Python").click()
    for label, shell in (
        ("The call as curl", ["sh", "-c"]),
        ("The call in Python", [sys.executable, "-c"]),
    ):
        command = page.get_by_label(label).inner_text()
        said = subprocess.run([*shell, command], capture_output=True, text=True, check=False).stdout
        if "x2" not in said:
            console.problems.append(f"{label}: {command!r} says {said!r}")
    request = folder / "request 'of' a file.json"
    request.write_text(json.dumps(ROW))
    page.get_by_label("File", exact=True).check()
    page.get_by_label("File with a request as JSON").set_input_files(request)
    call.click()
    expect(answer).to_contain_text('"model_name": "x2"')
    page.get_by_label("JSON", exact=True).check()
    page.get_by_label("Request as JSON").fill("{")
    call.click()
    expect(page.get_by_role("alert")).to_be_visible()
    console.open("#/models/words")
    page.get_by_label("Texts, one a line").fill(f"{HOSTILE}\nhello")
    call.click()
    expect(answer).to_contain_text(HOSTILE)
    console.check("an answer")
    console.open("#/models/picture")
    from PIL import Image

    Image.new("RGB", (2, 2), (255, 0, 0)).save(folder / "red.png")
    page.get_by_label("Picture", exact=True).nth(1).set_input_files(folder / "red.png")
    call.click()
    expect(answer).to_contain_text("1")
    expect(page.get_by_alt_text("The chosen picture")).to_be_visible()
    console.open("#/models/words")
    page.get_by_role("button", name="Unload").click()
    expect(page.locator(".bar .state")).to_have_text("UNAVAILABLE")
    page.get_by_role("button", name="Load", exact=True).click()
    expect(page.locator(".bar .state")).to_have_text("READY")
    console.open("#/models/x2")
    page.get_by_label("Version").select_option("1")
    page.wait_for_url("**#/models/x2/1")
    console.open("#/models/net")
    expect(page.get_by_text("answers as the checkpoint does")).to_be_visible()
    page.get_by_text("The whole certificate").click()
    expect(page.get_by_label("Certificate", exact=True)).to_contain_text("modelport-certificate/1")
    console.open("#/models")
    page.get_by_label("Name contains").fill("pict")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_label("Name contains").fill("")
    page.get_by_label("not READY").check()
    expect(page.locator("tbody tr")).to_have_count(1)
    page.keyboard.press("Tab")
    console.open("#/requests")
    page.get_by_label("Show").select_option("notable")
    page.get_by_label("Largest first by").select_option("duration")
    expect(page.locator("tbody")).to_contain_text("absent")
    rollout_actions(console)
    return console.end()


def rollout_actions(console: Console) -> None:
    console.open("#/rollouts/x2")
    page = console.page
    phase = page.locator("main .facts .state").first
    for pressed, then in (("pause", "paused"), ("resume", "running"), ("rollback", "rolled back")):
        page.get_by_label("Reason").fill(HOSTILE)
        page.get_by_role("button", name=pressed).click()
        expect(phase).to_have_text(then)
        expect(page.locator("tbody").last).to_contain_text(HOSTILE)
    page.get_by_role("button", name="disagreeing answers").click()
    expect(page.locator("main")).to_contain_text("candidate_outputs")
    console.check("a rollout")


def smoothness(browser: Browser, url: str) -> list[str]:
    """The longest frame while 1,000 models change 50 times a second, for 5 seconds.

    Other work of the machine delays frames as well, so the best of a few rounds counts.
    """
    console = Console(browser, url)
    page = console.open("#/gateway")
    rounds = [page.evaluate(CHANGES) for _ in range(ROUNDS)]
    best = min(rounds, key=lambda each: float(each["longest"][0]))
    print(f"1,000 models: {best['updates']} updates in 5 s, {best['frames']} frames, the longest "
          f"{', '.join(f'{each:.0f}' for each in best['longest'])} ms")  # fmt: skip
    if best["longest"][0] > FRAME_MS:
        console.problems.append(f"a frame of {best['longest'][0]:.0f} ms")
    if page.locator("tbody tr").count() != 50:
        console.problems.append("the list is not in pages")
    return console.end()


def many_models(browser: Browser, folder: Path) -> list[str]:
    """A real gateway with 1,000 models: pages, and the search."""
    root = folder / "many"
    for number in range(1000):
        models.fake(root, f"model-{number:04}", "FP32", "4")
    with serving(root) as gateway:
        problems = smoothness(browser, admin(gateway))
        console = Console(browser, admin(gateway))
        page = console.open()
        expect(page.locator("tbody tr")).to_have_count(50)
        page.get_by_role("button", name="Next").click()
        expect(page.locator("tbody tr").first).to_contain_text("model-0050")
        page.get_by_label("Name contains").fill("0999")
        expect(page.locator("tbody tr")).to_have_count(1)
        return problems + console.end()


def authority(browser: Browser, folder: Path) -> list[str]:
    """A reader sees; what it may not do is refused, and the page says so."""
    access = folder / "access"
    access.mkdir()
    keys, entries = {}, []
    for caller in ("reader", "owner"):
        keys[caller], entry = api_key_file.generate(caller)
        entries.append(entry)
    with api_key_file.locked(access / "keys.toml") as replace:
        replace(entries)
    (access / "access.toml").write_text(RULES)
    root = models.repository(folder / "guarded")
    flags = ("--access", str(access / "access.toml"), "--model-control-mode", "explicit",
             "--load-model", "*", "--workers", "2",
             "--access-log", str(folder / "guarded.log"))  # fmt: skip
    with serving(root, *flags) as gateway:
        console = Console(browser, admin(gateway))
        console.expected = ("401", "403", "404")
        console.page.goto(f"{console.url}/console")
        page = console.page
        for caller in ("reader", "owner"):
            if caller == "owner":
                page.get_by_role("button", name="Credential").click()
            expect(page.get_by_role("dialog")).to_be_visible()
            page.get_by_label("Key or token").fill(keys[caller])
            page.get_by_role("button", name="Use it").click()
            expect(page.locator("tbody")).to_contain_text("x2")
            page.get_by_role("link", name="x2").click()
            alert, unload = page.get_by_role("alert"), page.get_by_role("button", name="Unload")
            unload.click()
            if caller == "reader":
                expect(alert).to_contain_text("control")
                page.get_by_role("link", name="Requests").click()
                expect(alert).to_contain_text("console")
            else:
                expect(page.locator(".bar .state")).to_have_text("UNAVAILABLE")
                page.get_by_role("link", name="Requests").click()
                expect(page.locator("main h1")).to_have_text("Requests")
                page.get_by_role("link", name="Gateway").click()
                expect(page.locator("main")).to_contain_text("reader")
            page.get_by_role("link", name="Models").click()
        if "Bearer" in json.dumps(page.evaluate("[{...localStorage}, {...sessionStorage}]")):
            console.problems.append("the key is stored")
        return console.end()


def behind_prefix(browser: Browser, gateway: Gateway) -> list[str]:
    with prefixed(admin(gateway), "/ml/one") as url:
        console = Console(browser, url)
        console.expected = ("404",)  # no certificate
        for view in ("#/models", "#/models/x2", "#/rollouts", "#/gateway"):
            console.open(view)
            console.page.wait_for_timeout(300)
        page = console.open("#/models/x2")
        page.get_by_role("button", name="Call the model").click()
        expect(page.get_by_label("Answer")).to_contain_text("x2")
        page.goto(f"{url}/console/")
        page.locator("main h1").wait_for()
        return console.end()


def part(name: str, check: Callable[..., list[str]], *arguments: Any) -> bool:
    """Whether ``check`` finds no problem; print those that it finds."""
    try:
        problems = check(*arguments)
    except (AssertionError, Error) as error:
        problems = [str(error)]
    print(f"{name}: {'no fault' if not problems else ''}", flush=True)
    for problem in problems:
        print(f"  {problem}", file=sys.stderr)
    return not problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, help="Folder for a picture of every view.")
    pictures = parser.parse_args().pictures
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
    axe = axe_source()
    with tempfile.TemporaryDirectory() as work, sync_playwright() as playwright:
        folder = Path(work)
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=list(ARGUMENTS)
        )
        flags = ("--model-control-mode", "explicit", "--load-model", "*", "--cache-config",
                 "local,size=1048576", "--access-log", str(folder / "access.log"))  # fmt: skip
        with serving(repository(folder), *flags) as gateway, traffic(gateway):
            url = admin(gateway)
            ask(f"{url}/v2/rollouts/x2", PLAN)
            found = [
                part("what is stopped and seen", unseen, browser, url, axe),
                part("first paint", first_paint, browser, url),
                part("views", looks, browser, url, axe, pictures),
                part("prefix", behind_prefix, browser, gateway),
                part("actions", actions, browser, gateway, folder),
            ]
        found.append(part("authority", authority, browser, folder))
        found.append(part("1,000 models", many_models, browser, folder))
    return int(not all(found))


if __name__ == "__main__":
    verb.run(main)
