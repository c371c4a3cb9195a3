"""A reader who pastes the blocks of a page, one after the other, into terminals of one folder.

The blocks run as they stand: by bash, with the environment's programs, at the ports that they name.
The page has a network and processes of its own (``unshare``). Where the system allows none, it uses
the machine's. A block that ends with a server in the foreground gets a terminal of its own; the
server is interrupted before the next one starts, and at the end.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.docs import pages
from tests.docs.pages import ROOT, CodeBlock

#: Commands that cannot run here → why. A block of them is left out.
NOT_RUN = {
    r"docker |kubectl ": "needs Docker, or a cluster: make deploy",
    r"(ray|serve|export PYTHONPATH=\S+|export RAY_\S+) ": "needs a Ray cluster: make ray",
    r"hf download ": "needs the network; the test writes small models in their places",
    r"locust (?!.*--headless)": "a web page that runs until it is closed",
    r"make ": "runs the tests, or takes minutes: .ci/run and the release run these targets",
    r"modelport export resnet50|modelport export deeplab": "the extra all has no timm",
    r"modelport compare .*--json-report|python -m modelport\.loadtests\.report": "installs other "
    "servers, and takes ten minutes: make compare",
    r"modelport gate ": "takes ten minutes, and decides nothing on a busy machine: make gate-real",
    r"modelport migrate ": "needs TorchServe's archives: make migrate",
    r"modelport (rollout |infer fraud examples)": "takes a rollout's time and live requests: "
    "tests/gateway/rollout, make rollout-faults",
    r"modelport .*s3://|export AWS_": "needs a bucket: make storage",
    r"pip install (--constraint|\.\[)": "needs the network: make package installs a wheel",
    r"source ": "the environment of the tests is active already",
}
UNSHARE = ("unshare", "-rn", "--pid", "--fork", "--kill-child", "--mount-proc")
SECONDS = 900
#: What a page may leave out: inputs to compare, and rounds of a comparison.
ENVIRONMENT = {
    "MODELPORT_COMPARE_QUICK": "true",
    "MODELPORT_CONVERT_SAMPLES": "20",
    "MODELPORT_EXPORT_MAX_DROP": "0.5",
    "MODELPORT_EXPORT_MIN_AGREEMENT": "0",
    "MODELPORT_EXPORT_SAMPLES": "20",
    "OMP_NUM_THREADS": "1",
    # Packages of pages are installed into a folder of their own, without an index.
    "PIP_NO_BUILD_ISOLATION": "0",  # the value of "build isolation": pip negates the name only
    "PIP_NO_DEPS": "1",
    "PIP_TARGET": "site",
    "PYTHONPATH": "site",
}
#: Brings the loopback interface of a new network up, and becomes bash.
_BASH = """
import fcntl, os, socket, struct, sys
if os.environ.pop("OWN_NETWORK", ""):
    with socket.socket() as any:
        fcntl.ioctl(any, 0x8914, struct.pack("16sH14x", b"lo", 0x1))  # SIOCSIFFLAGS, IFF_UP
os.execvp("bash", ["bash", sys.argv[1]])
"""
#: `set -m`: as in a terminal, a background job is a process group, and `%1` names it.
_PROLOGUE = r"""
set -eEm -o pipefail
trap 'echo "$BLOCK: failed: $BASH_COMMAND" >&2; cat server.log >&2 2>/dev/null' ERR
interrupt() {
    if [ -z "$SERVER" ]; then return; fi
    kill -INT -- "-$SERVER"
    wait "$SERVER" || test $? -eq 130
    SERVER=
}
started() {
    until grep -q started server.log; do
        kill -0 "$SERVER" 2> /dev/null || return 1
        sleep 0.1
    done
}
SERVER=
"""
#: Commands that ask the gateway which the quickstart has left running.
ASKS = re.compile(r"localhost:800|modelport (infer|models|load|unload)\b")
GATEWAY = "modelport serve --model-repository model_repository"


def reason(block: CodeBlock) -> str:
    """The reason to leave the block out; empty if it runs.

    Raises:
        AssertionError: only some of its commands can run.
    """
    if block.language != "bash" or block.target:
        return ""
    reasons = [_reason(command) for command in pages.commands(block.text)]
    assert all(reasons) or not any(reasons), f"{block.place}: split it: only a part can run"
    return reasons[0]


def _reason(command: str) -> str:
    words = shlex.split(command, comments=True)
    said = " ".join(words)
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, f"{said} ")), "")


def asks_first(blocks: Sequence[CodeBlock]) -> bool:
    """Whether a gateway is asked before the page has started one."""
    for block in blocks:
        if not block.target and (ASKS.search(block.text) or "modelport serve" in block.text):
            return "modelport serve" not in block.text
    return False


def runnable(blocks: Iterable[CodeBlock]) -> list[CodeBlock]:
    """The blocks that are run or written."""
    return [
        block
        for block in blocks
        if block.target or (block.language in ("bash", "python") and not reason(block))
    ]


def serves(block: CodeBlock) -> bool:
    """Whether the block ends with a server in the foreground.

    Raises:
        AssertionError: something follows that server, and would wait for its end.
    """
    if block.language != "bash":
        return False
    commands = [shlex.split(each, comments=True) for each in pages.commands(block.text)]
    waiting = [
        words for words in commands if words[:2] == ["modelport", "serve"] and words[-1] != "&"
    ]
    assert waiting in ([], commands[-1:]), f"{block.place}: what follows 'modelport serve' waits"
    return bool(waiting)


def script(blocks: Iterable[CodeBlock], gateway: bool) -> str:
    """The page as one program of bash. ``gateway``: the quickstart's runs already."""
    parts = [_PROLOGUE]
    if gateway:
        parts += ["BLOCK='the gateway of the quickstart'", *_server(GATEWAY)]
    for block in blocks:
        parts += [f"BLOCK={block.place}", *_lines(block)]
    return "\n".join([*parts, "BLOCK='the end of the page'", "interrupt", ""])


def _lines(block: CodeBlock) -> Iterator[str]:
    if block.target:
        folder = shlex.quote(str(Path(block.target).parent))
        yield f"mkdir -p {folder}; cat > {shlex.quote(block.target)} <<'END OF BLOCK'"
    elif block.language == "python":
        yield "python - <<'END OF BLOCK'"
    elif serves(block):
        yield from _server(block.text)
        return
    else:
        yield block.text
        return
    yield f"{block.text}END OF BLOCK"


def _server(text: str) -> Iterator[str]:
    yield f"interrupt; : > server.log\n{{\n{text}\n}} 2> server.log &\nSERVER=$!\nstarted"


def paste(blocks: Iterable[CodeBlock], folder: Path, gateway: bool = False) -> str:
    """Run the blocks in ``folder``; what they print.

    Raises:
        AssertionError: a command failed.
    """
    file = folder / "page.sh"
    file.write_text(script(blocks, gateway))
    own = _own_network()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **ENVIRONMENT, "PATH": path, "HOME": str(folder)}
    (folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\nmax-time = 60\n")
    done = subprocess.run(
        [*(UNSHARE if own else ()), sys.executable, "-c", _BASH, str(file)],
        cwd=folder,
        env=environment | ({"OWN_NETWORK": "1"} if own else {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@functools.cache
def _own_network() -> bool:
    return subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0


def checkout(folder: Path) -> None:
    """Add the files of the checkout that pages name."""
    for name in ("deploy", "loadtests"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "README.md", folder)
