"""Quotas of principals, per model: requests, bytes and tokens per second, requests in flight.

The rates are counted by the generic cell rate algorithm (ITU-T I.371): a token bucket that
is one clock, the time at which it is full again. A request that is larger than the bucket is
admitted when the bucket is not empty, and the next one waits longer. The tokens of a text are known
when it is tokenized; until then, an estimate is charged, so that of many at once some are refused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from modelport.gateway.access.principal import Principal
from modelport.gateway.access.quota_ledger import QuotaLedger
from modelport.gateway.errors import QuotaExceeded
from modelport.gateway.toml_tables import count, names, number, read_by

_REQUESTS, _BYTES, _TOKENS = 0, 1, 2
#: Pairs of principal and model whose quota is remembered.
_REMEMBERED = 4096
#: Tries to charge a row before another process takes it.
_TRIES = 8
TOO_MANY_CALLERS = "too many callers with a quota are active"
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Quota:
    """One element of ``[[quotas]]``; the first that matches a request holds.

    Attributes:
        principals: Names and groups, as in rules.
        models: Globs of model names. Each model has a bucket of its own.
        burst: Requests that may come at once; by default those of a second.
    """

    principals: tuple[str, ...] = field(metadata=read_by(names))
    models: tuple[str, ...] = field(default=("*",), metadata=read_by(names))
    requests_per_second: float | None = field(
        default=None, metadata=read_by(number(0, 1e9, open_end=True))
    )
    burst: int | None = field(default=None, metadata=read_by(count(1, 10**9)))
    in_flight: int | None = field(default=None, metadata=read_by(count(1, 10**6)))
    bytes_per_second: float | None = field(
        default=None, metadata=read_by(number(0, 1e15, open_end=True))
    )
    tokens_per_second: float | None = field(
        default=None, metadata=read_by(number(0, 1e12, open_end=True))
    )

    @property
    def capacity(self) -> float:
        """Requests that the bucket holds when it is full."""
        assert self.requests_per_second is not None
        return float(self.burst or max(1.0, self.requests_per_second))

    @property
    def policies(self) -> bytes:
        """``RateLimit-Policy`` (draft-ietf-httpapi-ratelimit-headers-10): quotas and windows."""
        items = []
        if self.requests_per_second is not None:
            window = math.ceil(self.capacity / self.requests_per_second)
            items.append(f'"requests";q={math.floor(self.capacity)};w={window}')
        if self.bytes_per_second is not None:
            items.append(f'"bytes";q={max(1, int(self.bytes_per_second))};qu="content-bytes";w=1')
        if self.tokens_per_second is not None:
            items.append(f'"tokens";q={max(1, int(self.tokens_per_second))};qu="tokens";w=1')
        if self.in_flight is not None:
            items.append(f'"in-flight";q={self.in_flight};qu="concurrent-requests"')
        return ", ".join(items).encode()


@dataclass(slots=True)
class QuotaAccount:
    """The quota of a caller for one model, and its row of the ledger.

    All credentials of a principal share the row.
    """

    quota: Quota
    key: tuple[int, int]
    row: int | None = None


def retry_after(error: QuotaExceeded) -> tuple[bytes, bytes]:
    """The ``retry-after`` header of a refusal, in whole seconds."""
    return b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_seconds))


class Quotas:
    """Admits requests by the quotas of ``access.toml``.

    Args:
        matches: Whether one of the names and groups of a quota means the caller.
        clock: Seconds, as ``time.monotonic``.

    Attributes:
        rules: The quotas, in their order.
    """

    def __init__(
        self,
        quotas: Sequence[Quota],
        ledger: QuotaLedger,
        matches: Callable[[Sequence[str], Principal], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rules, self._ledger, self._matches = quotas, ledger, matches
        self._clock = clock
        self._accounts: dict[tuple[Principal, str], QuotaAccount | None] = {}

    def replace(
        self, quotas: Sequence[Quota], matches: Callable[[Sequence[str], Principal], bool]
    ) -> None:
        """Use other quotas from now on; requests in flight still count."""
        self.rules, self._matches = quotas, matches
        self._accounts.clear()

    def account(self, principal: Principal, model: str) -> QuotaAccount | None:
        """The account of a principal for a model; None: no quota limits it."""
        if not self.rules:
            return None
        key = principal, model
        try:
            return self._accounts[key]
        except KeyError:
            pass
        if len(self._accounts) >= _REMEMBERED:  # clients choose both names
            self._accounts.clear()
        account = self._accounts[key] = self._find(principal, model)
        return account

    def _find(self, principal: Principal, model: str) -> QuotaAccount | None:
        for quota in self.rules:
            named = any(fnmatchcase(model, glob) for glob in quota.models)
            if named and self._matches(quota.principals, principal):
                return QuotaAccount(quota, self._ledger.key(principal.name, model))
        return None

    def enter(self, account: QuotaAccount, size_bytes: int, tokens: int = 0) -> int:
        """Charge a request of ``size_bytes`` and about ``tokens``; return its row, for ``leave``.

        Raises:
            QuotaExceeded: It may come later; nothing was charged.
        """
        for _ in range(_TRIES):
            row = self._row(account, self._clock())
            with self._ledger.locked(row):
                if self._ledger.belongs(row, account.key):  # no other process has just taken it
                    self._spend(account.quota, row, size_bytes, tokens)
                    self._ledger.count_in_flight(row, 1)
                    return row
        raise QuotaExceeded(1.0, TOO_MANY_CALLERS)

    def _spend(self, quota: Quota, row: int, size_bytes: int, tokens: int) -> None:
        ledger, now = self._ledger, self._clock()
        if quota.in_flight is not None and ledger.in_flight(row) >= quota.in_flight:
            raise QuotaExceeded(1.0, f"more than {quota.in_flight} requests in flight")
        requests = quota.requests_per_second
        if requests is not None:
            excess = ledger.clock(row, _REQUESTS) - now - (quota.capacity - 1.0) / requests
            if excess > 1e-9:
                raise QuotaExceeded(excess, f"more than {requests:g} requests per second")
        sizes = (
            (_BYTES, "bytes", quota.bytes_per_second, size_bytes),
            (_TOKENS, "tokens", quota.tokens_per_second, tokens),
        )
        for which, unit, rate, _ in sizes:
            if rate is not None and (excess := ledger.clock(row, which) - now - 1.0) > 0.0:
                raise QuotaExceeded(excess, f"more than {rate:g} {unit} per second", unit)
        for which, _, rate, size in sizes:
            if rate is not None:
                self._charge(row, which, now, size / rate)
        if requests is not None:
            self._charge(row, _REQUESTS, now, 1.0 / requests)

    def correct(self, account: QuotaAccount, row: int, tokens: int) -> None:
        """Charge ``tokens`` more to a request that ``enter`` admitted, or less if negative."""
        rate = account.quota.tokens_per_second
        if rate is not None:
            with self._ledger.locked(row):
                self._charge(row, _TOKENS, self._clock(), tokens / rate)

    def leave(self, row: int) -> None:
        """End a request that ``enter`` admitted; until then, the row stays its caller's."""
        self._ledger.count_in_flight(row, -1)

    def headers(self, account: QuotaAccount) -> Headers:
        """``RateLimit-Policy`` and ``RateLimit``: what is left, and when the buckets are full."""
        quota, row, now = account.quota, account.row, self._clock()
        fields = [(b"ratelimit-policy", quota.policies)]
        if row is None or quota.requests_per_second is None:
            return fields
        debt = max(0.0, self._ledger.clock(row, _REQUESTS) - now)
        left = math.floor(quota.capacity - debt * quota.requests_per_second + 1e-6)
        value = f'"requests";r={max(0, left)};t={math.ceil(debt)}'
        return [*fields, (b"ratelimit", value.encode())]

    def _row(self, account: QuotaAccount, now: float) -> int:
        row = account.row
        if row is None or not self._ledger.belongs(row, account.key):
            row = account.row = self._ledger.row(account.key, now)
            if row is None:
                raise QuotaExceeded(1.0, TOO_MANY_CALLERS)
        return row

    def _charge(self, row: int, which: int, now: float, seconds: float) -> None:
        self._ledger.set_clock(row, which, max(now, self._ledger.clock(row, which)) + seconds)
