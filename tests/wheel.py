"""The wheel in an empty environment, used as one who knows nothing but ``pip install`` does.

``python -m tests.wheel`` builds the source distribution and the wheel, checks what is in them,
installs the wheel without an extra, and there runs the public interface, ``doctor``, ``serve`` with
two workers, ``infer`` and the load test's locustfile. It prints the environment's size, and exits
with 1 where something does not work.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from tests import models

ROOT = Path(__file__).parents[1]
#: Of site-packages as pip leaves it and as ``du`` counts it: whole blocks of the disk, folders and
#: byte-compiled files included. The environment has no pip of its own. A megabyte is 10^6 bytes.
MAX_MEGABYTES = 255
JOURNEY = """
import asyncio, sys
import modelport

async def ask(url):
    async with modelport.AsyncClient(url) as client:
        return (await client.infer("twice", {"x": [[1, 2, 3, 4]]}))["y"].tolist()

with modelport.testing.serve(sys.argv[1]) as server:
    for url in (server.http_url, server.grpc_url):
        with modelport.Client(url) as client:
            assert client.ready("twice")
            assert client.infer("twice", {"x": [[1, 2, 3, 4]]})["y"].tolist() == [[2, 4, 6, 8]]
        assert asyncio.run(ask(url)) == [[2, 4, 6, 8]]
open("net.pt", "wb").close()
try:
    modelport.export("net.pt")
except modelport.Unsupported as error:
    assert "pip install '.[torch]'" in str(error), error
else:
    raise SystemExit("an export without torch did not fail")
"""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="modelport-wheel-") as work:
        folder = Path(work)
        wheel = build(folder)
        check_contents(wheel)
        bin_folder, packages = install(wheel, folder / "environment")
        use(bin_folder, folder)
        check_locustfile(packages, folder)
    return 0


def build(folder: Path) -> Path:
    """The wheel built from the source distribution, once it is equal to one of the tree."""
    source = folder / "source"
    names = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    for name in filter(None, names):  # without what lies about: build/ and egg-info may be old
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target, follow_symlinks=False)
    command = (sys.executable, "-m", "build", "--no-isolation")
    run(*command, "--outdir", str(folder / "both"), cwd=source)
    run(*command, "--wheel", "--outdir", str(folder / "direct"), cwd=source)
    [wheel], [direct] = (sorted((folder / name).glob("*.whl")) for name in ("both", "direct"))
    one, two = (contents(each) for each in (wheel, direct))
    different = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    different = [name for name in different if not name.endswith(("/RECORD", "/METADATA"))]
    assert not different, f"the source distribution makes another wheel: {different}"
    print(f"wheel        {wheel.stat().st_size / 1e6:.1f} MB, {len(one)} files")
    return wheel


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def check_contents(wheel: Path) -> None:
    names = contents(wheel).keys()
    tops = {name.partition("/")[0] for name in names}
    described = f"modelport-{wheel.name.split('-')[1]}.dist-info"
    assert tops == {"modelport", "triton_python_backend_utils", described}, tops
    assert {"modelport/py.typed", "triton_python_backend_utils/py.typed"} <= names
    assert "modelport/loadtests/locustfile.py" in names
    assert "modelport/gateway/protocols/swagger_ui/swagger-ui-bundle.js.gz" in names
    console = ROOT / "gateway" / "server" / "console"
    assert {f"modelport/gateway/server/console/{each.name}" for each in console.iterdir()} <= names


def install(wheel: Path, environment: Path) -> tuple[Path, Path]:
    """The folders of the programs and of the packages of a new environment with the wheel."""
    run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    python = str(environment / "bin" / "python")
    constraints = str(ROOT / "constraints.txt")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--constraint", constraints, str(wheel))
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    parts = {each.name: disk_usage(each) for each in packages.iterdir()}
    size = sum(parts.values())
    largest = sorted(parts.items(), key=lambda part: -part[1])[:8]
    print(f"environment  {size:.0f} MB: " + ", ".join(f"{n} {mb:.0f}" for n, mb in largest))
    assert size <= MAX_MEGABYTES, f"the base installation has {size:.0f} MB"
    names = {path.name for path in packages.iterdir() if path.name.startswith("modelport")}
    assert names == {"modelport", f"modelport-{wheel.name.split('-')[1]}.dist-info"}, names
    of_the_repository = {"gateway", "exporters", "loadtests", "benchmarks", "tests"}
    assert not of_the_repository & {path.name for path in packages.iterdir()}
    return environment / "bin", packages


def disk_usage(path: Path) -> float:
    """The megabytes that ``path`` takes on the disk, with everything in it."""
    return sum(each.lstat().st_blocks * 512 for each in (path, *path.rglob("*"))) / 1e6


def use(programs: Path, folder: Path) -> None:
    """Run every way in, from another folder and without the environment on PATH, as pipx has it."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    model = models.multiply(folder / "twice.onnx")
    script = elsewhere / "journey.py"
    script.write_text(JOURNEY)
    python, command = str(programs / "python"), str(programs / "modelport")
    run(python, "-W", "error", str(script), str(model), cwd=elsewhere)
    assert "onnxruntime" in run(command, "doctor", cwd=elsewhere)
    assert run(command, "--version", cwd=elsewhere) == run(python, "-m", "modelport", "--version")
    with ServeProcess(command, str(model), "--workers", "2", cwd=elsewhere) as served:
        request = elsewhere / "request.json"
        request.write_text('{"x": [[1, 2, 3, 4]]}')
        url = ("--url", f"127.0.0.1:{served.port}")
        answer = run(command, "infer", "twice", str(request), *url, "--json", cwd=elsewhere)
        assert "[2.0, 4.0, 6.0, 8.0]" in answer, answer
    assert served.status == 0, served.status


def check_locustfile(packages: Path, folder: Path) -> None:
    """Put a load on the model with the installed locustfile.

    The extra ``load`` is that of the environment which runs this, to install nothing twice.
    """
    programs, locust = folder / "environment" / "bin", Path(sys.executable).parent / "locust"
    with ServeProcess(
        str(programs / "modelport"), str(folder / "twice.onnx"), cwd=folder
    ) as served:
        printed = run(
            *(str(locust), "-f", str(packages / "modelport" / "loadtests" / "locustfile.py")),
            *("--host", f"http://127.0.0.1:{served.port}", "--model", "twice", "--headless"),
            *("--users", "2", "--load-seconds", "1"),
            cwd=folder / "elsewhere",
        )
    sent = [
        int(n) for n in re.findall(r"^\s*Aggregated\s+(\d+)\s+0\(0\.00%\)", printed, re.MULTILINE)
    ]
    assert sent[-1:] > [0], printed
    print(f"locustfile   {sent[-1]} requests")


class ServeProcess:
    """``modelport serve`` as a process until the block ends; ``status`` is its exit status."""

    def __init__(self, command: str, *arguments: str, cwd: Path) -> None:
        ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
        self._process = subprocess.Popen(
            [command, "serve", *arguments, *ports, "--exit-timeout-secs", "2"],
            cwd=cwd,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.port, self.status = 0, None

    def __enter__(self) -> ServeProcess:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            found = re.search(r"listening\s.*http_port=(\d+)", line)
            if found:
                self.port = int(found[1])
            if "started" in line:
                return self
        raise AssertionError("the server ended before it had started")

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate(timeout=60)
        self.status = self._process.returncode


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
