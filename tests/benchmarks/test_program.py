"""Command lines and termination of the scripts of ``loadtests``."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import script

ROOT = Path(__file__).parents[2]
#: Serves until it is told to end, and says so.
SERVES = """
import sys, time
from pathlib import Path
from benchmarks import script
from modelport.loadtests.system import processes

def main():
    (port,) = processes.free_ports(1)
    server = [sys.executable, "-m", "http.server", str(port), "--bind", processes.HOST]
    ready = f"http://{processes.HOST}:{port}/"
    with processes.running(server, log=Path(sys.argv[1]), ready=ready, must_stop=False) as process:
        print(process.pid, flush=True)
        time.sleep(600)

script.run(main)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_program_that_is_signalled_to_end_leaves_no_server(
    number: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SERVES, str(tmp_path / "log")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert not Path(f"/proc/{server}").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("benchmarks.peers", "--rounds", "0"),
        ("benchmarks.peers", "--report", "pyproject.toml"),
        ("benchmarks.hop", "--share", "nan"),
        ("benchmarks.memory", "--requests", "-1"),
        ("benchmarks.overload", "--client-core", "4096"),
        ("benchmarks.scaling", "--seconds", "0"),
        ("benchmarks.startup", "--rounds", "many"),
    ],
)
def test_impossible_arguments_get_an_error_without_a_traceback(arguments: tuple[str, ...]) -> None:
    name, *flags = arguments
    command = [sys.executable, "-m", name, *flags]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode in (1, 2)
    assert "Traceback" not in run.stderr
    assert flags[-1] in run.stderr.splitlines()[-1]


def test_a_core_is_one_of_this_machines() -> None:
    with pytest.raises(Exception, match="there is no core 4096"):
        script.core("4096")


def test_make_knows_that_no_verb_is_a_file() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"\.PHONY: ((?:.*\\\n)*.*)", makefile)
    verbs = set(re.findall(r"^([a-z-]+):.* ## ", makefile, re.MULTILINE))
    assert verbs == set(phony.replace("\\", " ").split())
