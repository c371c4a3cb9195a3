"""The same Python models in the gateway and in a real Triton 2.51: equal statuses and texts.

    python -m tests.triton_python

The server comes with the wheel ``nvidia-pytriton``. Folders in stack traces are left out, because
the gateway shows none. Answers that are better on purpose are not compared. Exits with 1 if any
answer differs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.servers.modelport import executable
from modelport.loadtests.serving import pytriton
from modelport.loadtests.system import environments
from modelport.loadtests.system.processes import HOST, free_ports, running
from tests import verb
from tests.gateway.backends.python import python_models
from tests.gateway.backends.python.test_answers import SENDERS, WRONG, told
from tests.gateway.backends.python.test_loading import BODY, FAILS

#: Causes of failed loads, of which Triton does not say the reason in the same words.
BETTER_LOADS = frozenset({"os._exit"})
#: Ends of texts: a second exception's own trace, and the end of a load's line.
_REST = re.compile(r"\nMESSAGE UNAVAILABLE.*|;\n\Z", re.DOTALL)
_FOLDERS = re.compile(r"(?<=[\s(])/\S*/(?=[^/\s]+\.py)")
_INSIDE = re.compile(r"\n  (<frozen importlib|triton_python_backend_utils\.py)[^\n]*")
#: A stack that has no frame of the model's.
_NO_STACK = re.compile(r"\n\nAt:\n?\Z")


def post(port: int, path: str, document: Any, seconds: float = 30) -> tuple[int, str]:
    """Status and text of an answer; an error's text without folders."""
    request = urllib.request.Request(f"http://{HOST}:{port}{path}", json.dumps(document).encode())
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            text = _REST.sub("", str(json.load(error)["error"]))
        return error.code, _NO_STACK.sub("", _INSIDE.sub("", _FOLDERS.sub("", text)))


def cases() -> Iterator[tuple[str, str, Any]]:
    """Name, path and document of each request."""
    codes = [code for code, _, text in WRONG if not text.startswith("=") or text == "=no"]
    better = ("yield", "requests[0].get_response_sender()")
    codes = [code for code in codes if not code.startswith(better)]
    codes += [told(code) for code in SENDERS if "reply(1)" not in code]
    for code in (*codes, "return [reply(1, 2)]"):
        tensor = {"name": "code", "datatype": "BYTES", "shape": [1], "data": [code]}
        yield code, "/v2/models/act/infer", {"inputs": [tensor]}
    for cause in FAILS.keys() - BETTER_LOADS:
        yield f"load: {cause}", f"/v2/repository/models/{_named(cause)}/load", {}


def _named(cause: str) -> str:
    return f"fails_{re.sub(r'[^a-z]', '_', cause)}"


@contextlib.contextmanager
def servers(work: Path) -> Iterator[tuple[int, int]]:
    """The HTTP ports of Triton and of the gateway."""
    models = work / "models"
    python_models.coded(models, "act")
    for cause, (source, _) in FAILS.items():
        config = python_models.TENSORS + "max_batch_size: 16\n"
        python_models.model(models, _named(cause), BODY.format(source), config)
    ports, flags = free_ports(6), ["--model-control-mode", "explicit", "--load-model", "act"]
    command, environment = pytriton.serve(models, work, *ports[:3])
    # The stub takes numpy from the Python that it finds.
    programs = environments.venv("triton", *pytriton.REQUIREMENTS)
    environment["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
    ours = [*executable(), "serve", "--model-repository", str(models), "--allow-python", *flags]
    ours += ["--http-port", str(ports[3]), "--grpc-port", str(ports[4])]
    ours += ["--metrics-port", str(ports[5])]
    with contextlib.ExitStack() as stack:
        for name, words, port in (
            ("triton", [*command, "--model-control-mode=explicit", "--load-model=act"], ports[0]),
            ("modelport", ours, ports[3]),
        ):
            ready = f"http://{HOST}:{port}/v2/models/act/ready"
            log = work / f"{name}.log"
            stack.enter_context(
                running(words, log=log, ready=ready, env=environment, cwd=work, must_stop=False)
            )
        yield ports[0], ports[3]


def main() -> int:
    different = count = 0
    with tempfile.TemporaryDirectory() as folder, servers(Path(folder)) as (theirs, ours):
        for name, path, document in cases():
            count += 1
            expected, found = post(theirs, path, document), post(ours, path, document)
            if expected != found:
                different += 1
                print(f"{name!r}\n  Triton    {expected}\n  modelport {found}")
    print(f"{count} answers, {different} different")
    return int(different > 0)


if __name__ == "__main__":
    verb.run(main)
