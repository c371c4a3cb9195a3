"""The checks of ``make gpu-check``."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from modelport import Client
from modelport.gateway.errors import ModelportError
from tests.gpu_check import load, onnx, subjects
from tests.gpu_check.subjects import FORMATS, KINDS, MAX_BATCH, GpuSubject
from tests.server import Gateway, serving

MEGABYTE = 1 << 20
#: What all loads but the first may leave on the device, or in the memory of a processor's gateway.
MOST_LEFT = {"cuda": 64 * MEGABYTE, "cpu": 256 * MEGABYTE}
RELOADS, FIRST_RELOADS = {"cuda": 50, "cpu": 10}, 5
MODELS = {"cuda": ("fraud", "vit", "vit-b16"), "cpu": ("fraud", "vit", "vit-b16-short")}
#: A device that no machine has.
NO_DEVICE = 99
#: Of each measurement of speed.
MEASURED_SECONDS = {"cuda": 2.0, "cpu": 0.5}
#: The result of a check: a line for the table, and figures.
Found = tuple[str, dict[str, Any]]


class CheckRow(NamedTuple):
    name: str
    verdict: str
    seconds: float
    text: str
    figures: dict[str, Any]


class CheckRunner:
    """Runs checks until the time is over; one that fails does not end the others."""

    def __init__(self, deadline: float) -> None:
        self.rows: list[CheckRow] = []
        self.deadline = deadline

    def check(self, name: str, check: Callable[..., Found], *arguments: Any) -> None:
        began = time.monotonic()
        if began > self.deadline:
            self.leave_out(name, "no time was left")
            return
        try:
            text, figures = check(*arguments)
            row = CheckRow(name, "ok", time.monotonic() - began, text, figures)
        except Exception as error:  # whatever a GPU comes up with
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            row = CheckRow(name, "FAIL", time.monotonic() - began, text[:300], {})
        self.rows.append(row)
        print(f"{row.verdict:7} {row.name}: {row.text}", file=sys.stderr, flush=True)

    def leave_out(self, name: str, reason: str) -> None:
        self.rows.append(CheckRow(name, "skipped", 0, reason, {}))


def document(rows: list[CheckRow]) -> dict[str, Any]:
    return {"checks": [row._asdict() for row in rows]}


def run(
    folder: Path, device: str, models: Sequence[str], pieces: Path, deadline: float
) -> list[CheckRow]:
    """Make the models, serve them on ``device``, and return a row for each check."""
    checks = CheckRunner(deadline)
    found = [subjects.subject(name) for name in models]
    repository = folder / "models"
    _export(checks, repository, [subject.name for subject in found], device)
    hands = {subject.name: _by_hand(checks, subject, device) for subject in found}
    if device == "cuda":
        torch.cuda.empty_cache()
    made = [(s, form) for s in found for form in FORMATS if _exists(repository, s, form)]
    flags = ("--model-control-mode", "explicit", "--allow-native-code")
    with serving(repository, *flags, may_fork=False) as gateway:
        context = ServedDevice(gateway, device)
        for subject, form in made:
            name = f"{subject.name}-{form}"
            checks.check(f"{name}: load", context.load, name)
            checks.check(f"{name}: answers", context.answers, subject, name)
            checks.check(f"{name}: speed", context.speed, subject, name, hands[subject.name])
            checks.check(f"{name}: requests cut off", context.cut_off, subject, name)
            checks.check(f"{name}: unload", context.unload, name)
        for form in FORMATS:
            if _exists(repository, found[0], form):
                name = f"{found[0].name}-{form}"
                checks.check(f"{name}: {RELOADS[device]} loads", context.reload, name, deadline)
        _placements(checks, context, repository, found[0])
    # Without --allow-native-code, so the archive is tried in a process of its own first.
    with serving(repository, *flags[:2], may_fork=False) as gateway:
        name = f"{found[0].name}-torchscript"
        checks.check("kill -9 in flight", ServedDevice(gateway, device).killed, found[0], name)
    onnx.run(checks, folder, device, pieces)
    return checks.rows


def _exists(repository: Path, subject: GpuSubject, form: str) -> bool:
    return (repository / f"{subject.name}-{form}" / "config.pbtxt").exists()


def _export(checks: CheckRunner, repository: Path, names: list[str], device: str) -> None:
    """Export in processes of their own: compiling takes longest, and uses few cores."""

    def one(name: str, form: str) -> Found:
        command = (sys.executable, "-m", "tests.gpu_check.subjects", str(repository))
        seconds = max(1.0, checks.deadline - time.monotonic())
        done = subprocess.run(
            [*command, name, form, device], capture_output=True, text=True, timeout=seconds
        )
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        assert done.returncode == 0, f"status {done.returncode}: {reason}"
        return f"{name}-{form}", {}

    workers = max(1, (os.cpu_count() or 2) // 2)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        # The slowest first: ViT-B/16, compiled.
        for form in reversed(list(FORMATS)):
            for name in reversed(names):
                pool.submit(checks.check, f"{name}-{form}: export", one, name, form)


def _by_hand(checks: CheckRunner, subject: GpuSubject, device: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def measured() -> Found:
        for rows in (1, MAX_BATCH):
            found[str(rows)] = load.by_hand(subject, device, rows, MEASURED_SECONDS[device])
        return _speeds(found), found

    checks.check(f"{subject.name}: a loop by hand", measured)
    return found


def _speeds(found: dict[str, dict[str, float]]) -> str:
    return ", ".join(
        f"{name}: {one['rows_per_second']:.0f}/s p99 {one['p99_ms']:.2f} ms"
        for name, one in found.items()
    )


def _placements(
    checks: CheckRunner, context: ServedDevice, repository: Path, subject: GpuSubject
) -> None:
    of, kind = f"{subject.name}-torchscript", KINDS[context.device]
    two = subjects.variant(repository, of, "two-instances", kind=kind, count=2)
    checks.check("two instances: load", context.load, two)
    checks.check("two instances: answers", context.answers, subject, two)
    checks.check("two instances: speed", context.speed, subject, two, {})
    automatic = subjects.variant(repository, of, "automatic", count=1)
    checks.check("KIND_AUTO", context.load, automatic)
    absent = subjects.variant(
        repository, of, "absent", kind=KINDS["cuda"], count=1, gpus=[NO_DEVICE]
    )
    checks.check("a device that does not exist", context.refused, absent)


class ServedDevice:
    """A gateway with models on a device."""

    def __init__(self, gateway: Gateway, device: str) -> None:
        self.gateway, self.device = gateway, device
        self.urls = (f"http://{gateway.http}", f"grpc://{gateway.grpc}")

    @contextmanager
    def client(self) -> Iterator[Client]:
        with Client(self.urls[0], timeout_seconds=120) as client:
            yield client

    def used(self) -> int:
        """Bytes in use on the GPU; on a processor, the gateway's own."""
        if self.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            return int(total - free)
        status = Path(f"/proc/{self.gateway.process.pid}/status").read_text()
        return 1024 * int(status.partition("VmRSS:")[2].split()[0])

    def load(self, name: str) -> Found:
        before, began = self.used(), time.monotonic()
        with self.client() as client:
            client.load(name)
            config = client.config(name)
        seconds, taken = time.monotonic() - began, self.used() - before
        groups = config["instance_group"]
        wanted = "KIND_GPU" if self.device == "cuda" else "KIND_CPU"
        assert all(group["kind"] == wanted for group in groups), groups
        assert wanted == "KIND_CPU" or all(list(group["gpus"]) == [0] for group in groups), groups
        text = f"{wanted}, {seconds:.1f} s, {taken / MEGABYTE:.0f} MiB"
        return text, {"seconds": seconds, "bytes": taken}

    def answers(self, subject: GpuSubject, name: str) -> Found:
        """One request at a time, a batch of a client, and batches that the gateway forms."""
        requests = load.Requests(subject, {1: 8, 3: 2, MAX_BATCH: 2})
        single = load.Requests(subject, {1: 2 * MAX_BATCH})
        for url in self.urls:
            asyncio.run(load.each(url, name, requests))
            asyncio.run(load.many(url, name, single, 0.5))
        batches = self._batches(name)
        assert batches, "the gateway formed no batch"
        worst = max(requests.worst, single.worst)
        return f"within {worst:.0%} of the tolerance, {subject.tolerance}", {"worst": worst}

    def _batches(self, name: str) -> bool:
        """Whether the gateway has run more than one request together."""
        with urllib.request.urlopen(f"{self.urls[0]}/v2/models/{name}/stats") as reply:
            (found,) = json.load(reply)["model_stats"]
        return int(found["execution_count"]) < int(found["inference_count"])

    def speed(self, subject: GpuSubject, name: str, by_hand: dict[str, Any]) -> Found:
        requests = load.Requests(subject, {1: 2 * MAX_BATCH})
        seconds = MEASURED_SECONDS[self.device]
        found: dict[str, Any] = {}
        for url in self.urls:
            protocol = url.partition(":")[0]
            for concurrency in (1, load.CONCURRENCY):
                work = load.many(url, name, requests, seconds, concurrency)
                found[f"{protocol} x {concurrency}"] = asyncio.run(work)
        return _speeds(found), found | {"by_hand": by_hand}

    def cut_off(self, subject: GpuSubject, name: str) -> Found:
        large = load.Requests(subject, {MAX_BATCH: 1})
        cut = sum(asyncio.run(load.abandoned(url, name, large, 20)) for url in self.urls)
        for url in self.urls:
            asyncio.run(load.each(url, name, large))
        return f"{cut} of 40 requests cut off, then answers are right", {"cut": cut}

    def unload(self, name: str) -> Found:
        with self.client() as client:
            client.unload(name)
            assert not client.ready(name)
        return f"{self.used() / MEGABYTE:.0f} MiB in use after it", {"bytes": self.used()}

    def reload(self, name: str, deadline: float) -> Found:
        used, count = [], 0
        with self.client() as client:
            while count < RELOADS[self.device]:
                client.load(name)
                client.unload(name)
                count += 1
                used.append(self.used())
                assert time.monotonic() < deadline, f"the time was over after {count} loads"
        left = used[-1] - used[FIRST_RELOADS - 1]
        assert left <= MOST_LEFT[self.device], f"{left / MEGABYTE:.0f} MiB are left: {used}"
        text = f"{left / MEGABYTE:.1f} MiB more after {count} loads than after {FIRST_RELOADS}"
        return text, {"used": used}

    def refused(self, name: str) -> Found:
        reason = ""
        try:
            with self.client() as client:
                client.load(name)
        except ModelportError as error:
            reason = str(error)
        wanted = str(NO_DEVICE) if self.device == "cuda" else "KIND_GPU"
        assert wanted in reason, reason or "it was loaded"
        return reason, {}

    def killed(self, subject: GpuSubject, name: str) -> Found:
        before = self.used()
        self.load(name)
        requests = load.Requests(subject, {MAX_BATCH: 1})
        kill = self.gateway.process.kill
        failed = asyncio.run(load.until_killed(self.urls[1], name, requests, kill))
        assert failed == load.CONCURRENCY
        end = time.monotonic() + 20
        while self.device == "cuda" and self.used() > before + MOST_LEFT["cuda"]:
            assert time.monotonic() < end, f"{self.used() - before} bytes are still in use"
            time.sleep(0.2)
        return f"{failed} callers got an error, and the memory is free", {"failed": failed}
