"""Webhooks of rollouts: called before each stage, and after each change.

Before a stage all of them must permit it, with an answer of 2xx. Otherwise the rollout stays in its
stage, and they are called again later. After a change they are told, and their answer is ignored.
A rollback is never kept waiting. Only the gateway that writes a state calls.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import orjson
import structlog

from modelport.gateway.errors import InvalidArgument, ModelportError, Unavailable
from modelport.gateway.rollout.plan import RolloutPlan, public_url
from modelport.gateway.rollout.shared_state.state import RolloutEventKind, RolloutState
from modelport.gateway.runtime import checked_json, gateway_files
from modelport.gateway.runtime.gateway_files import FILES, FileContent

log = structlog.get_logger("modelport.rollout")

#: The header of the signature; its form is GitHub's.
SIGNATURE_HEADER = "x-modelport-signature-256"
#: The event of a call before a stage; those after a change are ``RolloutEventKind``.
PRE_STAGE = "pre-stage"
ANSWER_SECONDS = 10.0
#: The first pause before another call, and the longest one; each is twice the one before.
RETRY_SECONDS, MAX_RETRY_SECONDS = 2.0, 60.0
#: Attempts to notify of a change, and the most that are under way at once.
ATTEMPTS, MAX_NOTIFYING = 3, 100
#: A permission is for now; later the webhooks are asked again.
PERMITTED_SECONDS = 60.0
MAX_SECRET_BYTES = 4096
NO_SECRET = (
    "webhooks are signed, and this gateway has no secret for that; start it with "
    "--rollout-webhook-secret FILE"
)


NO_SEAL = (
    "its webhooks are not called: no gateway with this --rollout-webhook-secret has started the "
    "plan; roll it back, and start it again"
)


def read_secret(file: Path) -> bytes:
    """The secret in ``file``, without white space around it.

    Raises:
        InvalidArgument: it cannot be read, or is empty or too long.
    """
    return _secret(gateway_files.read(file))


def check_secret(file: Path) -> None:
    """Raise ``InvalidArgument`` if ``read_secret`` did at the start of the gateway."""
    _secret(FILES.keep("webhook secret", file))


def _secret(file: FileContent) -> bytes:
    try:
        secret = file.read().strip()
    except OSError as error:
        raise InvalidArgument(
            f"the secret '{file.path}' cannot be read: {error.strerror}"
        ) from error
    if not 0 < len(secret) <= MAX_SECRET_BYTES:
        raise InvalidArgument(f"the secret '{file.path}' must have 1 to {MAX_SECRET_BYTES} bytes")
    return secret


def seal(secret: bytes, plan: RolloutPlan) -> str:
    """The HMAC-SHA256 of ``plan``, by which a gateway knows a plan that a gateway has started.

    Anyone who can write to the repository can write a state, and no other plan's webhooks get a
    signature. The prefix keeps seals apart from signatures: no body of a call begins with it.
    """
    stored = checked_json.write(RolloutPlan.from_json(plan.to_json()))  # as it will be read
    return hmac.new(secret, b"plan\0" + stored, hashlib.sha256).hexdigest()


def signature(secret: bytes, body: bytes) -> str:
    """The value of ``SIGNATURE_HEADER``: the HMAC-SHA256 of ``body``."""
    return f"sha256={hmac.new(secret, body, hashlib.sha256).hexdigest()}"


class RolloutWebhooks:
    """Calls of the webhooks in the plans of one gateway's rollouts. Only the event loop uses it.

    Args:
        secret: the file with the secret of the signatures, read for each call; None: no plan may
            have webhooks.
    """

    def __init__(
        self,
        secret: Path | None = None,
        *,
        answer_seconds: float = ANSWER_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._secret = secret
        self._answer_seconds = answer_seconds
        self._retry_seconds = retry_seconds
        self._now = monotonic
        #: The permission that was asked for last, by model.
        self._permissions: dict[str, _Permission] = {}
        self._notifying: set[asyncio.Task[None]] = set()
        #: The plan whose seal was checked last, with the seal.
        self._known: set[tuple[RolloutPlan, str]] = set()

    def seal(self, plan: RolloutPlan) -> str:
        """Seal a plan that this gateway starts; without webhooks it needs no seal.

        Raises:
            InvalidArgument: the webhooks of ``plan`` could not be signed.
        """
        if not plan.webhooks:
            return ""
        if self._secret is None:
            raise InvalidArgument(NO_SECRET)
        return seal(read_secret(self._secret), plan)

    def _seal_problem(self, state: RolloutState) -> str:
        """The reason why the webhooks of ``state`` are not called; empty: a gateway started it."""
        key = state.plan, state.seal
        if key in self._known:
            return ""
        try:
            if self._secret is None:
                raise InvalidArgument(NO_SECRET)
            expected = seal(read_secret(self._secret), state.plan)
        except InvalidArgument as error:
            return str(error)
        if not hmac.compare_digest(expected.encode(), state.seal.encode()):
            return NO_SEAL
        self._known = {key}  # the secret may be replaced while the rollout runs
        return ""

    # -- before a stage ---------------------------------------------------------------------------

    async def require(self, new: RolloutState) -> None:
        """Ask for the stage of ``new``, which a person wants.

        Raises:
            Unavailable: a webhook does not permit it.
        """
        if not _asks(new):
            return
        if problem := self._seal_problem(new):
            raise Unavailable(problem)
        permission = self._permission(new)
        if not permission.given:  # the calls continue if this waiting is cancelled
            await asyncio.wait((permission.ask(self._body(new, PRE_STAGE)),))
        if not permission.given:  # the calls may have been given up
            problem = permission.problem or "the webhooks have not answered"
            raise Unavailable(f"{problem}; nothing has changed, try again later")

    def permit(self, new: RolloutState) -> bool:
        """Whether the stage of ``new`` may begin; if that is unknown, ask in the background."""
        if not _asks(new):
            return True
        if self._seal_problem(new):
            return False
        permission = self._permission(new)
        if not permission.given and permission.due:
            permission.ask(self._body(new, PRE_STAGE))
        return permission.given

    def problem(self, state: RolloutState) -> str:
        """The reason why the next stage is not permitted; empty: none is known."""
        plan = state.plan
        if plan.webhooks and (problem := self._seal_problem(state)):
            return problem
        permission = self._permissions.get(plan.model)
        if permission is None or permission.key[0] != plan.id or not permission.problem:
            return ""
        return f"{permission.problem}; it will be called again"

    def _permission(self, new: RolloutState) -> _Permission:
        model, key = new.plan.model, (new.plan.id, new.stage, new.phase)
        known = self._permissions.get(model)
        if known is None or known.key != key:
            if known is not None:
                known.cancel()
            retry, urls = self._retry_seconds, new.plan.webhooks
            known = _Permission(key, urls, self._status, self._now, retry)
            self._permissions[model] = known
        return known

    # -- after a change ---------------------------------------------------------------------------

    def notify(self, new: RolloutState) -> None:
        """Report the latest change in the background, with a few attempts."""
        if new.plan.webhooks and (problem := self._seal_problem(new)):
            log.error("the webhooks of a rollout are not notified", reason=problem)
            return
        for url in new.plan.webhooks:
            if len(self._notifying) >= MAX_NOTIFYING:
                log.warning(
                    "a webhook is not notified: too many webhooks do not respond",
                    webhook=public_url(url),
                )
                continue
            body = self._body(new, str(new.events[-1].kind))
            task = asyncio.create_task(self._notify(url, body))
            self._notifying.add(task)
            task.add_done_callback(self._notifying.discard)

    async def _notify(self, url: str, body: bytes) -> None:
        pause = self._retry_seconds
        for left in reversed(range(ATTEMPTS)):
            problem = await self._status(url, body)
            if not problem:
                return
            if left:
                await asyncio.sleep(pause)
                pause *= 2
        log.warning("a webhook was not notified", reason=problem)

    def cancel(self) -> None:
        """Give up all calls."""
        for permission in self._permissions.values():
            permission.cancel()
        self._permissions.clear()
        for task in self._notifying:
            task.cancel()

    # -- calls ------------------------------------------------------------------------------------

    async def _status(self, url: str, body: bytes) -> str:
        """Call ``url``; return the problem, or nothing after an answer of 2xx."""
        from modelport.gateway.upstream.single_requests import call_webhook  # imports aiohttp

        try:
            if self._secret is None:
                raise InvalidArgument(NO_SECRET)
            header = {SIGNATURE_HEADER: signature(read_secret(self._secret), body)}
            status = await call_webhook(url, body, header, self._answer_seconds)
        except ModelportError as error:
            return f"the webhook {public_url(url)} cannot be called: {error}"
        return (
            "" if 200 <= status < 300 else f"the webhook {public_url(url)} returned status {status}"
        )

    def _body(self, new: RolloutState, event: str) -> bytes:
        plan, change = new.plan, new.events[-1]
        stages = plan.stages
        stage = stages[new.stage]._asdict()
        return orjson.dumps(
            {
                "rollout": plan.id,
                "model": plan.model,
                "baseline": plan.baseline._asdict(),
                "candidate": plan.candidate._asdict(),
                "event": event,
                "phase": new.phase,
                "stage": {"number": new.stage + 1, "of": len(stages), **stage},
                "reason": change.reason,
                "by": change.by,
                "time": change.time,
            }
        )


class _Permission:
    """The permission of all webhooks of a plan for one stage."""

    def __init__(
        self,
        key: tuple[object, ...],
        urls: tuple[str, ...],
        status: Callable[[str, bytes], Awaitable[str]],
        now: Callable[[], float],
        retry_seconds: float,
    ) -> None:
        self.key = key
        #: The reason of the latest refusal.
        self.problem = ""
        self._urls = urls
        self._status = status
        self._now = now
        self._retry_seconds = retry_seconds
        self._until = self._due = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    @property
    def given(self) -> bool:
        return self._now() < self._until

    @property
    def due(self) -> bool:
        """Whether it is time to ask."""
        return self._now() >= self._due

    def ask(self, body: bytes) -> asyncio.Task[None]:
        """Call the webhooks, unless they are being called; the task ends with their answers."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(body))
        return self._asking

    def cancel(self) -> None:
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self, body: bytes) -> None:
        problems = await asyncio.gather(*(self._status(url, body) for url in self._urls))
        self.problem = next(filter(None, problems), "")
        if not self.problem:
            self._until = self._now() + PERMITTED_SECONDS
            return
        self._due = self._now() + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, MAX_RETRY_SECONDS)
        log.warning("the next stage of a rollout waits", reason=self.problem)


def _asks(new: RolloutState) -> bool:
    """Whether ``new`` begins a stage, or promotes the candidate, and there are webhooks to ask."""
    begins = (RolloutEventKind.STARTED, RolloutEventKind.ADVANCED, RolloutEventKind.PROMOTED)
    return bool(new.plan.webhooks) and new.events[-1].kind in begins
