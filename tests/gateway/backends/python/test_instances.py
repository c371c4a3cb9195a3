"""Instances of Python models that come and go by a change of ``instance_group``."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.backends.python import python_models
from tests.gateway.backends.python.asking import ask, control
from tests.server import Gateway, serving

PROCESS = "return [reply(os.getpid())]"
SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 60000000 "
KINDS = {
    "plain": "",
    "direct": f"{SEQUENCES} direct {{ }} }}",
    "oldest": f"{SEQUENCES} oldest {{ }} }}",
}


def group(count: int, kind: str = "KIND_CPU") -> str:
    return f"instance_group {{ kind: {kind} count: {count} }} # the instances\n"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for name, extra in KINDS.items():
        python_models.coded(root, name, f"{extra}\n{group(1)}")
        code = root / name / "1" / "model.py"
        failing = 'if args["model_instance_kind"] == "GPU": raise ValueError("no such device")'
        code.write_text(
            code.read_text().replace("self.args = args", f"self.args = args\n        {failing}")
        )
    return root


@pytest.fixture(scope="module")
def gateway(repository: Path) -> Iterator[Gateway]:
    flags = ("--model-control-mode", "explicit", "--allow-python")
    with serving(repository, *flags, "--load-model", "*") as gateway:
        yield gateway


def scale(gateway: Gateway, repository: Path, name: str, instances: str, extra: str = "") -> str:
    """Change the groups of the file, and load the model; the error, if any."""
    file = repository / name / "config.pbtxt"
    lines = [line for line in file.read_text().splitlines() if "# the instances" not in line]
    file.write_text("\n".join([*lines, extra, instances]))
    return control(gateway, name)


def configuration(gateway: Gateway, name: str) -> Any:
    with urllib.request.urlopen(f"http://{gateway.http}/v2/models/{name}/config") as answer:
        return json.load(answer)


def count(gateway: Gateway, name: str) -> int:
    return sum(each["count"] for each in configuration(gateway, name)["instance_group"])


def processes(gateway: Gateway, name: str, requests: int = 6) -> set[float]:
    """The workers that answer; instances take turns."""
    found = set()
    for _ in range(requests):
        status, answer = ask(gateway, PROCESS, name)
        assert status == 200, answer
        found.add(answer["outputs"][0]["data"][0])
    return found


def test_instances_come_and_go_and_the_others_stay(gateway: Gateway, repository: Path) -> None:
    first = processes(gateway, "plain")
    assert scale(gateway, repository, "plain", group(3)) == ""
    three = processes(gateway, "plain")
    assert len(three) == 3
    assert first < three
    assert scale(gateway, repository, "plain", group(1)) == ""
    assert processes(gateway, "plain") == first
    config = configuration(gateway, "plain")
    config["instance_group"][0]["count"] = 2
    url = f"http://{gateway.http}/v2/repository/models/plain/load"
    body = json.dumps({"parameters": {"config": json.dumps(config)}}).encode()
    urllib.request.urlopen(urllib.request.Request(url, body)).close()
    assert first < processes(gateway, "plain")
    assert scale(gateway, repository, "plain", group(1)) == ""
    assert processes(gateway, "plain") == first
    # Anything else loads the model again, and so does a comment.
    assert scale(gateway, repository, "plain", group(1), "# other") == ""
    again = processes(gateway, "plain")
    assert not again & first
    assert scale(gateway, repository, "plain", group(2), 'parameters { key: "a" }') == ""
    assert not processes(gateway, "plain") & again


def test_an_instance_that_does_not_start_changes_nothing(
    gateway: Gateway, repository: Path
) -> None:
    before = processes(gateway, "plain")
    error = scale(gateway, repository, "plain", group(1) + group(1, "KIND_GPU"))
    assert "ValueError: no such device" in error
    assert processes(gateway, "plain") == before
    assert scale(gateway, repository, "plain", group(len(before))) == ""
    assert processes(gateway, "plain") == before


def test_a_request_in_flight_ends_on_the_instance_that_is_removed(
    gateway: Gateway, repository: Path, tmp_path: Path
) -> None:
    assert scale(gateway, repository, "plain", group(2)) == ""
    code = "\n".join([
        f"open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w').close()",
        f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)",
        PROCESS,
    ])  # fmt: skip
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, gateway, code, "plain") for _ in range(2)]
        while len(list(tmp_path.iterdir())) < 2:
            pass
        scaled = pool.submit(scale, gateway, repository, "plain", group(1))
        while count(gateway, "plain") != 1:
            pass
        (tmp_path / "go").touch()
        answers = [each.result() for each in asked]
        assert scaled.result() == ""
    assert [status for status, _ in answers] == [200, 200]
    assert len(processes(gateway, "plain")) == 1


def test_pending_requests_are_those_that_wait_for_an_instance(
    gateway: Gateway, repository: Path, tmp_path: Path
) -> None:
    assert scale(gateway, repository, "plain", group(1)) == ""
    code = f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n{PROCESS}"

    def found(metric: str) -> float:
        with urllib.request.urlopen(gateway.metrics) as answer:
            (line,) = (
                line
                for line in answer.read().decode().splitlines()
                if line.startswith(f'{metric}{{model="plain"')
            )
        return float(line.rpartition(" ")[2])

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, gateway, code, "plain") for _ in range(3)]
        while found("modelport_requests_in_flight") < 3:
            pass
        pending = found("nv_inference_pending_request_count")
        (tmp_path / "go").touch()
        assert [each.result()[0] for each in asked] == [200] * 3
    assert pending == 2
    assert found("nv_inference_pending_request_count") == 0


@pytest.mark.parametrize("name", ["direct", "oldest"])
def test_a_sequence_goes_on_where_it_is_until_its_end(
    gateway: Gateway, repository: Path, name: str
) -> None:
    def step(id: int, **flags: bool) -> float:
        status, told = ask(gateway, PROCESS, name, parameters={"sequence_id": id, **flags})
        assert status == 200, told
        process: float = told["outputs"][0]["data"][0]
        return process

    assert scale(gateway, repository, name, group(2)) == ""
    homes = {id: step(id, sequence_start=True) for id in (1, 2)}
    assert len({*homes.values()}) == 2
    assert scale(gateway, repository, name, group(1)) == ""
    assert {id: step(id) for id in homes} == homes
    assert scale(gateway, repository, name, group(2)) == ""
    other = step(3, sequence_start=True)
    assert {id: step(id, sequence_end=True) for id in homes} == homes
    new = {step(id, sequence_start=True, sequence_end=True) for id in (4, 5, 6)}
    assert other not in homes.values()
    assert new <= {other, *homes.values()}
    assert step(3, sequence_end=True) == other
