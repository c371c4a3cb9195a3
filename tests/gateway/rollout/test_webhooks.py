"""Webhooks of rollouts, which a real HTTP server answers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner

from modelport.cli import modelport
from modelport.gateway.errors import InvalidArgument, Unavailable
from modelport.gateway.rollout import controller as controllers
from modelport.gateway.rollout.controller import RolloutController
from modelport.gateway.rollout.shared_state.state import RolloutPhase
from modelport.gateway.rollout.shared_state.state_files import RolloutFiles
from modelport.gateway.rollout.shared_state.state_store import RolloutStore
from modelport.gateway.rollout.shared_state.transitions import RolloutCommand
from modelport.gateway.rollout.webhooks import PRE_STAGE, RolloutWebhooks
from modelport.gateway.runtime import checked_json
from tests.gateway.rollout.plans import plan
from tests.gateway.rollout.simulation import SimulatedProcesses, decide

SECRET = b"a secret of the team"
QUICK: dict[str, Any] = {"steps": (0.1, 1.0), "min_requests": 10, "min_seconds": 0.0}

Answer = Callable[[dict[str, Any]], Awaitable[web.Response]]


class Receiver:
    """A team's server: keeps the calls, and answers as ``answer`` says."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.signatures: list[tuple[str, bytes]] = []
        self.answer: Answer = accept

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.signatures.append((request.headers["x-modelport-signature-256"], body))
        self.calls.append(orjson.loads(body))
        return await self.answer(self.calls[-1])

    def events(self) -> list[tuple[str, int]]:
        return [(call["event"], call["stage"]["number"]) for call in self.calls]


class HookedGateway:
    """A controller on a folder, whose processes are simulated, and the receiver of its calls."""

    def __init__(self, folder: Path, receiver: Receiver, url: str) -> None:
        (folder / "secret").write_bytes(SECRET + b"\n")
        self.folder, self.receiver, self.url = folder, receiver, url
        self.processes = SimulatedProcesses(random.Random(1), time.monotonic)
        self.processes.slow = 0.0
        self.controller = RolloutController(
            RolloutStore(RolloutFiles(folder / "models", 30.0)),
            self.processes,
            decide,
            # A hook that anything waits for makes its test fail, instead of slow.
            webhooks=RolloutWebhooks(folder / "secret", answer_seconds=1e4, retry_seconds=0.05),
        )

    async def start(self, **fields: Any) -> None:
        await self.controller.start(plan(webhooks=(self.url,), **{**QUICK, **fields}))

    def status(self) -> dict[str, Any]:
        return self.controller.status("fraud")

    async def until(self, condition: Callable[[], bool], errors: float = 0.0) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self.processes.serve(1.0, errors)
                await asyncio.sleep(0.01)


async def accept(call: dict[str, Any]) -> web.Response:
    return web.Response(status=204)


@contextlib.asynccontextmanager
async def hooked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HookedGateway]:
    monkeypatch.setattr(controllers, "FOLLOW_SECONDS", 0.02)
    monkeypatch.setattr(controllers, "WATCH_SECONDS", 0.02)
    (folder / "models").mkdir()
    receiver = Receiver()
    application = web.Application()
    application.router.add_post("/hook", receiver.handle)
    async with TestServer(application) as server:
        gateway = HookedGateway(folder, receiver, str(server.make_url("/hook")))
        running = asyncio.create_task(gateway.controller.run())
        try:
            yield gateway
        finally:
            running.cancel()
            await asyncio.wait((running,))


async def test_each_stage_is_asked_for_and_each_change_told_with_a_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hooked(tmp_path, monkeypatch) as gateway:
        await gateway.start()
        receiver = gateway.receiver
        await gateway.until(lambda: ("promoted", 2) in receiver.events())
        # Telling does not keep the next question waiting, so that their order is not known.
        questions = [event for event in receiver.events() if event[0] == PRE_STAGE]
        assert questions == [(PRE_STAGE, 1), (PRE_STAGE, 2), (PRE_STAGE, 2)]
        told = {event for event in receiver.events() if event[0] != PRE_STAGE}
        assert told == {("started", 1), ("advanced", 2), ("promoted", 2)}
        for signed, body in receiver.signatures:
            assert signed == "sha256=" + hmac.new(SECRET, body, hashlib.sha256).hexdigest()
            other = hmac.new(b"another", body, hashlib.sha256).hexdigest()
            assert not hmac.compare_digest(signed, f"sha256={other}")
        (promoted,) = [call for call in receiver.calls if call["event"] == "promoted"]
        state = gateway.status()
        assert promoted["rollout"] == state["plan"]["id"]
        assert promoted["candidate"] == {"model": "fraud", "version": 3}
        assert promoted["baseline"] == {"model": "fraud", "version": 2}
        assert promoted["stage"] == {"number": 2, "of": 2, "kind": "canary", "share": 1.0}
        assert promoted["reason"] == "no harm was found"
        assert promoted["time"] == state["events"][-1]["time"]
    kept = [path.read_bytes() for path in (tmp_path / "models").rglob("*") if path.is_file()]
    assert kept
    assert not any(SECRET in content for content in kept)


async def test_a_hook_that_refuses_holds_the_stage_until_it_permits_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hooked(tmp_path, monkeypatch) as gateway:
        await gateway.start(max_seconds=0.5)
        receiver, refused = gateway.receiver, asyncio.Event()

        async def refuse(call: dict[str, Any]) -> web.Response:
            refused.set()
            return web.Response(status=302, headers={"location": "/elsewhere"})

        receiver.answer = refuse
        await gateway.until(lambda: bool(gateway.status()["problem"]))
        assert refused.is_set()
        assert gateway.status()["problem"].endswith("returned status 302; it will be called again")
        assert gateway.status()["problem"].startswith("the webhook http://127.0.0.1:")
        other = HookedGateway(tmp_path, receiver, gateway.url).controller
        await other.follow()  # another gateway, which does not call
        assert other.status("fraud")["problem"] == gateway.status()["problem"]
        asked = receiver.events().count((PRE_STAGE, 2))
        await gateway.until(lambda: receiver.events().count((PRE_STAGE, 2)) > asked)
        assert gateway.status()["stage"] == 0
        with pytest.raises(Unavailable, match=r"returned status 302; nothing has changed"):
            await gateway.controller.command("fraud", RolloutCommand.PROMOTE)
        assert gateway.status()["stage"] == 0
        receiver.answer = accept
        await gateway.until(lambda: gateway.status()["phase"] == RolloutPhase.PROMOTED)
        assert gateway.status()["problem"] == ""


async def test_a_hook_that_hangs_delays_no_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hooked(tmp_path, monkeypatch) as gateway:
        await gateway.start()
        hanging, end = asyncio.Event(), asyncio.Event()

        async def hang(call: dict[str, Any]) -> web.Response:
            hanging.set()
            await end.wait()
            return web.Response()

        gateway.receiver.answer = hang
        await gateway.until(hanging.is_set)
        revision = gateway.status()["revision"]
        await gateway.until(lambda: gateway.status()["revision"] > revision)  # it still leads
        gateway.processes.serve(10.0, errors=1.0)
        await gateway.until(lambda: gateway.status()["settled"])
        assert gateway.status()["phase"] == RolloutPhase.ROLLED_BACK
        assert gateway.status()["stage"] == 0
        assert not end.is_set()
        end.set()


async def test_a_person_rolls_back_while_a_hook_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hooked(tmp_path, monkeypatch) as gateway:
        await gateway.start(manual=True, min_requests=10**9)
        hanging, end = asyncio.Event(), asyncio.Event()

        async def hang(call: dict[str, Any]) -> web.Response:
            hanging.set()
            await end.wait()
            return web.Response()

        gateway.receiver.answer = hang
        command = gateway.controller.command
        promoting = asyncio.create_task(command("fraud", RolloutCommand.PROMOTE))
        await gateway.until(hanging.is_set)
        state = await command("fraud", RolloutCommand.ROLLBACK)
        assert state.phase is RolloutPhase.ROLLED_BACK
        assert not promoting.done()
        end.set()
        with pytest.raises(InvalidArgument, match="it has ended"):
            await promoting


async def test_a_gateway_that_stops_while_a_hook_hangs_begins_no_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hooked(tmp_path, monkeypatch) as gateway:
        await gateway.start(manual=True, min_requests=10**9)
        hanging = asyncio.Event()

        async def hang(call: dict[str, Any]) -> web.Response:
            hanging.set()
            await asyncio.Event().wait()
            raise AssertionError

        gateway.receiver.answer = hang
        controller = gateway.controller
        promoting = asyncio.create_task(controller.command("fraud", RolloutCommand.PROMOTE))
        await gateway.until(hanging.is_set)
        await controller.stop()
        with pytest.raises(Unavailable, match="have not answered; nothing has changed"):
            await promoting
        other = HookedGateway(tmp_path, gateway.receiver, gateway.url).controller
        await other.follow()
        assert other.status("fraud")["stage"] == 0


async def test_nothing_starts_that_a_hook_does_not_permit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hooked(tmp_path, monkeypatch) as gateway:

        async def refuse(call: dict[str, Any]) -> web.Response:
            return web.Response(status=500)

        gateway.receiver.answer = refuse
        with pytest.raises(Unavailable, match="returned status 500; nothing has changed"):
            await gateway.start()
        gateway.url = "http://127.0.0.1:1/"
        with pytest.raises(Unavailable, match=r"the webhook http://127.0.0.1:1 cannot be called"):
            await gateway.start()
        assert gateway.controller.models() == []
        assert not gateway.processes.applied


async def test_a_change_is_told_again_if_the_first_attempt_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hooked(tmp_path, monkeypatch) as gateway:
        receiver = gateway.receiver

        async def refuse_once(call: dict[str, Any]) -> web.Response:
            first = receiver.events().count((call["event"], call["stage"]["number"])) == 1
            return web.Response(status=500 if first and call["event"] == "paused" else 200)

        receiver.answer = refuse_once
        await gateway.start(min_requests=10**9)
        await gateway.controller.command("fraud", RolloutCommand.PAUSE, "lunch", "ana")
        await gateway.until(lambda: receiver.events().count(("paused", 1)) == 2)
        first, second = (call for call in receiver.calls if call["event"] == "paused")
        assert first == second
        assert (first["reason"], first["by"]) == ("lunch", "ana")


async def test_a_state_that_no_gateway_wrote_calls_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hooked(tmp_path, monkeypatch) as gateway:
        await gateway.start(manual=True, min_requests=10**9)
        await gateway.until(lambda: ("started", 1) in gateway.receiver.events())
        state = gateway.controller._states.require("fraud").state
        forged = replace(state.plan, webhooks=(f"{gateway.url}?elsewhere",), manual=False)
        calls = len(gateway.receiver.calls)
        for seal in ("", state.seal, "é" * 64):
            latest = gateway.controller._states.require("fraud").state
            seen = replace(latest, revision=latest.revision + 1, plan=forged, seal=seal, leader="")
            file = f"state/fraud/{seen.revision:010d}.json"
            (tmp_path / "models/.rollouts" / file).write_bytes(checked_json.write(seen))
            await gateway.controller.follow()
            with pytest.raises(Unavailable, match="its webhooks are not called: no gateway"):
                await gateway.controller.command("fraud", RolloutCommand.PROMOTE)
        assert len(gateway.receiver.calls) == calls
        # Known-bad: without the check, the forged address is called with a signature.
        monkeypatch.setattr(RolloutWebhooks, "_seal_problem", lambda *_: "")
        await gateway.controller.command("fraud", RolloutCommand.PROMOTE)
        assert len(gateway.receiver.calls) > calls


async def test_a_secret_that_is_replaced_signs_the_rollouts_that_are_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hooked(tmp_path, monkeypatch) as gateway:
        await gateway.start(manual=True, min_requests=10**9)
        (tmp_path / "secret").write_bytes(b"another")
        await gateway.controller.command("fraud", RolloutCommand.PROMOTE)
        signed, body = gateway.receiver.signatures[-1]
        assert signed == "sha256=" + hmac.new(b"another", body, hashlib.sha256).hexdigest()


async def test_nobody_sees_the_secrets_in_the_url_of_a_webhook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hooked(tmp_path, monkeypatch) as gateway:
        address = gateway.url.removesuffix("/hook")
        gateway.url = f"{address.replace('://', '://ana:hidden@')}/hook?token=hidden"
        await gateway.start(manual=True, min_requests=10**9)
        assert gateway.status()["plan"]["webhooks"] == [address]
        state = await gateway.controller.command("fraud", RolloutCommand.ROLLBACK)
        await gateway.until(lambda: gateway.status()["settled"])
        history = await gateway.controller.history("fraud")
        assert "hidden" not in repr((gateway.status(), state.to_json(), history))
        files = [each for each in (tmp_path / "models/.rollouts").rglob("*") if each.is_file()]
        assert files
        assert {each.stat().st_mode & 0o777 for each in files} == {0o600}


async def test_an_answer_that_does_not_end_in_time_is_a_refusal(tmp_path: Path) -> None:
    async def hang(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    (tmp_path / "models").mkdir()
    (tmp_path / "secret").write_bytes(SECRET)
    application = web.Application()
    application.router.add_post("/", hang)
    async with TestServer(application) as server:
        controller = RolloutController(
            RolloutStore(RolloutFiles(tmp_path / "models", 30.0)),
            SimulatedProcesses(random.Random(1), time.monotonic),
            webhooks=RolloutWebhooks(tmp_path / "secret", answer_seconds=0.1),
        )
        with pytest.raises(Unavailable, match=r"no response within 0.1 s"):
            await controller.start(plan(webhooks=(str(server.make_url("/")),)))


async def test_without_a_secret_no_plan_has_webhooks(tmp_path: Path) -> None:
    store = RolloutStore(RolloutFiles(tmp_path, 30.0))
    controller = RolloutController(store, SimulatedProcesses(random.Random(1), time.monotonic))
    with pytest.raises(InvalidArgument, match="--rollout-webhook-secret"):
        await controller.start(plan(webhooks=("http://127.0.0.1/",)))


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http:///path", "http://a:99999/", "//a"])
def test_a_webhook_is_an_address_of_the_web(url: str) -> None:
    with pytest.raises(InvalidArgument, match="webhook"):
        plan(webhooks=(url,))


@pytest.mark.parametrize("content", [None, b"", b" \n", b"x" * 5000])
def test_a_gateway_without_a_readable_secret_does_not_start(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "secret").write_bytes(content)
    options = ["--model-repository", str(tmp_path), "--rollout-webhook-secret"]
    ended = CliRunner().invoke(modelport, ["serve", *options, str(tmp_path / "secret")])
    assert ended.exit_code != 0
    assert "the secret" in ended.output
    assert "Traceback" not in ended.output
