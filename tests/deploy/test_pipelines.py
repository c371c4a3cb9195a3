"""The release pipelines: their schemas, and their scripts, run against an S3 server of moto's."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import s3fs
import torch

from modelport.cli import modelport
from modelport.gateway.cli.admin_client import AdminClient
from modelport.gateway.repository import config as configuration
from modelport.loadtests.system.processes import HOST, free_ports, running
from tests.deploy import DEPLOY, thorough, tools
from tests.deploy.pipelines import Ran, github, gitlab

FOLDER = DEPLOY / "pipelines"
GITHUB, GITLAB = FOLDER / "github-actions.yml", FOLDER / "gitlab-ci.yml"
CHECKPOINT = DEPLOY.parent / "checkpoints" / "fraud.pt"
REPOSITORY = "s3://models/production"
#: What the gate decides is other tests' matter: here it asks for little, and decides soon.
SLO = """
[limits]
max_error_share = 0.5
max_wrong_share = 0.5
[regressions]
max_p50_regression = false
max_p99_regression = false
max_first_response_regression = false
[duration]
max_seconds = 120.0
slice_seconds = 0.5
slices = 1
min_rounds = 2
[rollout]
min_requests = 10
min_seconds = 0
power = false
"""


def lines() -> Iterator[str]:
    """Every call of modelport in the two files, as one line."""
    for path in (GITHUB, GITLAB):
        text = re.sub(r"\\\n\s*", "", path.read_text())
        yield from re.findall(r"(?:- |run: |^ +)(modelport (?!\().*)$", text, re.MULTILINE)


@pytest.mark.parametrize("line", sorted(set(lines())))
def test_modelport_has_the_command_and_its_options(line: str) -> None:
    _, *words = shlex.split(line)
    command: click.Command | None = modelport
    while isinstance(command, click.Group):
        command = command.get_command(click.Context(command), words.pop(0))
    assert command is not None
    known = {option for parameter in command.params for option in parameter.opts}
    given = {word for word in words if word.startswith("--")}
    assert given - known == set()
    required = {p.opts[0] for p in command.params if p.required and p.opts[0].startswith("--")}
    assert required - given == set()


def test_the_files_call_what_they_should() -> None:
    called = {path: re.findall(r"modelport (\w+) ", path.read_text()) for path in (GITHUB, GITLAB)}
    for names in called.values():
        order = [name for name in names if name != "rollout"]
        assert order == ["export", "verify", "publish", "gate", "publish"]
        assert names[-2:] == ["rollout", "rollout"]  # start, report


@pytest.mark.parametrize("path", [GITHUB, GITLAB], ids=lambda path: path.stem)
def test_what_is_installed_are_extras_of_the_project_and_the_pytorch_that_it_pins(
    path: Path,
) -> None:
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked, later = re.findall(
        r'pip install "modelport\[([\w,]+)\] @ \$MODELPORT"', path.read_text()
    )
    assert set(asked.split(",")) <= extras.keys()
    assert set(asked.split(",")) >= {"torch", "load", "s3"}  # export, gate, publish
    assert later == "load"  # report
    (torch,) = re.findall(r"(torch==\S+)", path.read_text())
    assert torch in extras["torch"]


@thorough
def test_the_files_fit_the_schemas_of_their_services(tmp_path: Path) -> None:
    judge = tools.linter("check-jsonschema")
    for path, flags in (
        (GITHUB, ("--builtin-schema", "vendor.github-workflows")),
        (GITLAB, ("--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci")),
    ):
        tools.check(judge, *flags, path)
        wrong = tmp_path / path.name
        wrong.write_text(
            path.read_text().replace("runs-on", "runs_on").replace("script:", "scrip:")
        )
        assert tools.said(judge, *flags, wrong)[0] != 0


# -- run -------------------------------------------------------------------------------------------


@dataclass
class Site:
    """A checkout with a checkpoint and a key, and production on S3 with the first version."""

    checkout: Path
    environment: dict[str, str]
    key: str
    storage: s3fs.S3FileSystem

    def versions(self) -> list[str]:
        self.storage.invalidate_cache()
        found = self.storage.ls("models/production/fraud")
        return sorted(name for name in (Path(path).name for path in found) if name.isdigit())

    def served(self) -> list[int]:
        """The versions that production's configuration allows."""
        self.storage.invalidate_cache()
        content: bytes = self.storage.cat("models/production/fraud/config.pbtxt")
        return list(configuration.parse(content.decode()).version_policy.specific.versions)

    def call(self, *words: str) -> None:
        status, said = tools.said(
            sys.executable, "-m", "modelport", *words, cwd=self.checkout, env=self.environment
        )
        assert status == 0, said


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    if not CHECKPOINT.is_file():
        tools.check(sys.executable, "-m", "modelport", "demo", cwd=DEPLOY.parent)
    checkout = tmp_path / "checkout"
    (checkout / "checkpoints").mkdir(parents=True)
    shutil.copy(CHECKPOINT, checkout / "checkpoints")
    (checkout / "slo.toml").write_text(SLO)
    (port,) = free_ports(1)
    environment = {
        "AWS_ENDPOINT_URL": f"http://{HOST}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(DEPLOY.parent),
    }
    moto = [str(Path(sys.executable).with_name("moto_server")), "-H", HOST, "-p", str(port)]
    with running(
        moto, log=tmp_path / "moto.log", ready=f"http://{HOST}:{port}/moto-api/", must_stop=False
    ):
        storage = s3fs.S3FileSystem(
            key="test", secret="test", endpoint_url=environment["AWS_ENDPOINT_URL"]
        )
        storage.mkdir("models")
        made = Site(checkout, environment, "", storage)
        made.call("keygen", "--output", "release")
        made.key = (checkout / "release.key").read_text().rstrip("\n")
        (checkout / "release.key").rename(tmp_path / "release.key")
        environment["RELEASE_KEY_FILE"] = str(tmp_path / "release.key")
        made.call(
            *("export", "checkpoints/fraud.pt", "--model", "fraud", "--format", "onnx"),
            *("--sign-key", environment["RELEASE_KEY_FILE"], "--repository", "first"),
        )
        made.call("rollback", "fraud", "--model-version", "1", "--repository", "first")
        made.call("publish", "first/fraud", "--repository", REPOSITORY)
        shutil.rmtree(checkout / "first")
        yield made


@contextlib.contextmanager
def production(site: Site, work: Path) -> Iterator[AdminClient]:
    """A gateway that serves production, with requests to it."""
    http_port, grpc_port, metrics_port = free_ports(3)
    site.environment["GATEWAY"] = f"http://{HOST}:{metrics_port}"
    program = [sys.executable, "-m", "modelport"]
    serve = [
        *(*program, "serve", "--model-repository", REPOSITORY, "--http-port", str(http_port)),
        *("--grpc-port", str(grpc_port), "--metrics-port", str(metrics_port)),
    ]
    load = [*program, "loadtest", f"{HOST}:{http_port}", "-m", "fraud"]
    load += ["--rate", "100", "--duration", "1h", "--quiet"]
    ready = f"http://{HOST}:{http_port}/v2/health/ready"
    with running(serve, log=work / "gateway.log", ready=ready, env=site.environment):
        requests = subprocess.Popen(load, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield AdminClient(site.environment["GATEWAY"])
        finally:
            requests.kill()
            requests.wait()


def outcome(gateway: AdminClient) -> tuple[str, str]:
    """The phase of the latest rollout, and the reason of its end."""
    state = gateway.get("/v2/rollouts/fraud")
    return state["phase"], state["events"][-1]["reason"]


def failure(ran: list[Ran]) -> tuple[str, int]:
    """The first step that failed, and its exit code."""
    return next((one.step, one.status) for one in ran if one.status)


def on_github(site: Site, work: Path, event: str = "push") -> list[Ran]:
    temporary = work / "runner"
    temporary.mkdir()
    environment = {
        **site.environment,
        "RUNNER_TEMP": str(temporary),
        "GITHUB_STEP_SUMMARY": str(work / "summary.md"),
    }
    known = {"secrets.RELEASE_KEY": site.key}
    return list(github(GITHUB, site.checkout, work, known, environment, event))


def on_gitlab(site: Site, work: Path, branch: str = "main") -> list[Ran]:
    environment = {
        **site.environment,
        "RELEASE_KEY": site.environment["RELEASE_KEY_FILE"],
        "AWS_TOKEN": "token",
    }
    return list(gitlab(GITLAB, site.checkout, work, environment, branch))


@thorough
def test_github_releases_what_it_measured_and_rolls_it_out(site: Site, tmp_path: Path) -> None:
    with production(site, tmp_path) as gateway:
        ran = on_github(site, tmp_path)
        assert [r.step for r in ran if r.status == 0] == [
            "Export", "Verify", "Download the version in production", "Gate", "Summary",
            "Publish", "Roll out", "Report",
        ], ran[-1]  # fmt: skip
        assert outcome(gateway)[0] == "promoted"
    assert site.versions() == ["1", "2"]
    assert site.served() == [2]
    mine = (site.checkout / "candidate" / "fraud" / "1" / "model.onnx").read_bytes()
    assert site.storage.cat("models/production/fraud/2/model.onnx") == mine
    assert (tmp_path / "summary.md").read_text()
    assert not list((tmp_path / "runner").iterdir())  # the key is gone
    assert "testsuite" in (site.checkout / "gate.xml").read_text()
    assert "PROMOTED" in (tmp_path / "artifacts" / "rollout" / "rollout.html").read_text()
    assert all(site.key.splitlines()[1] not in r.said for r in ran)


@thorough
def test_gitlab_releases_what_it_measured_and_rolls_it_out(site: Site, tmp_path: Path) -> None:
    with production(site, tmp_path) as gateway:
        ran = on_gitlab(site, tmp_path)
        steps = ["export", "gate", "publish", "rollout", "after rollout"]
        assert [r.step for r in ran if r.status == 0] == steps, ran[-1]
        assert outcome(gateway)[0] == "promoted"
    assert site.versions() == ["1", "2"]
    assert site.served() == [2]
    assert "PROMOTED" in (tmp_path / "artifacts" / "rollout.html").read_text()


def retrain(checkpoint: Path) -> None:
    """Other weights in the same places, as after another training."""
    document = torch.load(checkpoint, weights_only=True)
    (weights,) = (part for name, part in document.items() if name.endswith("state_dict"))
    generator = torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            weights[name] = tensor + 0.01 * torch.randn(tensor.shape, generator=generator)
    torch.save(document, checkpoint)


def decide_otherwise(checkpoint: Path) -> None:
    """Turn every decision of the model round."""
    document = torch.load(checkpoint, weights_only=True)
    (weights,) = (part for name, part in document.items() if name.endswith("state_dict"))
    for name in ("head.weight", "head.bias"):
        weights[name] = -weights[name]
    torch.save(document, checkpoint)


@thorough
@pytest.mark.parametrize(
    ("run", "step"), [(on_github, "Roll out"), (on_gitlab, "rollout")], ids=["github", "gitlab"]
)
def test_a_model_that_decides_otherwise_than_allowed_is_rolled_back_and_fails_the_pipeline(
    run: Callable[[Site, Path], list[Ran]], step: str, site: Site, tmp_path: Path
) -> None:
    """The gate has no rows with labels, so that only production sees it."""
    decide_otherwise(site.checkout / "checkpoints" / "fraud.pt")
    (site.checkout / "slo.toml").write_text(f"{SLO}[answers]\nmax_disagreement = 0.01\n")
    with production(site, tmp_path) as gateway:
        ran = run(site, tmp_path)
        assert failure(ran) == (step, 1), ran
        phase, reason = outcome(gateway)
    assert phase == "rolled back"
    assert "disagree" in reason
    assert ran[-1].step in ("Report", "after rollout")
    assert site.versions() == ["1", "2"]
    assert site.served() == [1]


@thorough
@pytest.mark.parametrize("run", [on_github, on_gitlab])
def test_a_model_that_was_trained_again_is_released(
    run: Callable[[Site, Path], list[Ran]], site: Site, tmp_path: Path
) -> None:
    """With limits on answers that one round of a busy machine settles."""
    retrain(site.checkout / "checkpoints" / "fraud.pt")
    (site.checkout / "slo.toml").write_text(SLO.replace("share = 0.5", "share = 0.02"))
    with production(site, tmp_path) as gateway:
        ran = run(site, tmp_path)
        assert all(one.status == 0 for one in ran), ran[-1]
        assert outcome(gateway)[0] == "promoted"
    assert site.versions() == ["1", "2"]


@thorough
@pytest.mark.timeout(1200)  # the gate may take its ten minutes
def test_the_shipped_limits_do_not_fail_a_model_that_was_trained_again(
    site: Site, tmp_path: Path
) -> None:
    """File by file as shipped; a busy machine may leave latencies undecided."""
    retrain(site.checkout / "checkpoints" / "fraud.pt")
    shutil.copy(FOLDER / "slo.toml", site.checkout)
    ran = {one.step: one for one in on_github(site, tmp_path)}
    assert ran["Gate"].status in (0, 3), ran["Gate"]
    decision = json.loads((site.checkout / "gate.json").read_text())
    states = {one["name"]: one["status"] for one in decision["questions"]}
    assert states["answers of its own checkpoint"] == states["wrong answers"] == "pass"
    assert decision["agreement"]["decisions"] > 0


@thorough
def test_a_pull_request_and_a_branch_publish_nothing(site: Site, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert "Publish" not in [r.step for r in on_github(site, tmp_path / "a", "pull_request")]
    assert site.versions() == ["1"]


@thorough
def test_what_the_gate_does_not_pass_is_not_published(site: Site, tmp_path: Path) -> None:
    text = SLO.replace("[limits]", "[limits]\np50_ms = 0.0001")
    (site.checkout / "slo.toml").write_text(text)
    ran = on_github(site, tmp_path)
    assert failure(ran) == ("Gate", 1), ran[-1]
    assert site.versions() == ["1"]


@thorough
def test_a_candidate_signed_with_another_key_ends_at_verify(site: Site, tmp_path: Path) -> None:
    site.call("keygen", "--output", "other")
    site.key = (site.checkout / "other.key").read_text()
    ran = on_github(site, tmp_path)
    assert failure(ran) == ("Verify", 5), ran[-1]
    assert site.versions() == ["1"]
