"""JSON Web Key Sets: the public keys that verify tokens, from a file or an ``https`` URL.

The file is watched. The URL is fetched by a thread: again and again, and soon after a token names
a key that is not in the set. If the issuer does not respond with a key set, the old keys stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson
import structlog

from modelport.gateway.errors import ModelportError, UsageError, first_line
from modelport.gateway.runtime.gateway_files import FILES
from modelport.gateway.upstream.single_requests import download

if TYPE_CHECKING:
    from jwt import PyJWK

    from modelport.gateway.runtime.file_watcher import FileWatcher
    from modelport.gateway.runtime.gateway_files import Contents

log = structlog.get_logger("modelport.access")

#: Parsing holds Python's lock: half a millisecond for this size.
MAX_DOCUMENT_BYTES: Final = 64 * 1024
MAX_KEYS: Final = 100
MIN_RSA_BITS: Final = 2048
MAX_RSA_BITS: Final = 8192  # larger keys take milliseconds to verify with
_MAX_RSA_EXPONENT: Final = 2**32
_MAX_NUMBER_TEXT: Final = MAX_RSA_BITS // 6 + 4
#: Algorithm → key type and curve of its keys. None of them has a shared secret.
ALGORITHMS: Final[Mapping[str, tuple[str, str | None]]] = {
    **{f"{kind}{bits}": ("RSA", None) for kind in ("RS", "PS") for bits in (256, 384, 512)},
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}


class KeySet:
    """The keys of one issuer that can be used with the accepted algorithms."""

    def __init__(self, keys: Sequence[tuple[str | None, PyJWK]]) -> None:
        self._keys: dict[tuple[str | None, str], list[PyJWK]] = {}
        for kid, key in keys:
            for name in {kid, None}:
                self._keys.setdefault((name, key.algorithm_name), []).append(key)

    def find(self, kid: str | None, algorithm: str) -> PyJWK | None:
        """The key that a token names; without a name, the only key of its algorithm."""
        keys = self._keys.get((kid, algorithm), ())
        return keys[0] if len(keys) == 1 else None


def parse(content: bytes, algorithms: Sequence[str]) -> KeySet:
    """Read a key set; keys for other algorithms and other uses are left out.

    Raises:
        ValueError: It is not a key set, or has no key for ``algorithms``, or a private key.
    """
    try:
        document = orjson.loads(content)
    except ValueError as error:
        raise ValueError(f"not JSON: {first_line(error)}") from None
    rows = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        raise ValueError('not a JSON Web Key Set: it has no list "keys"')
    if len(rows) > MAX_KEYS:
        raise ValueError(f"more than {MAX_KEYS} keys")
    keys = []
    for row in rows:
        if isinstance(row, dict):
            keys += _keys(row, algorithms)
            time.sleep(0)  # pass Python's lock to the event loop, which may wait for it
    if not keys:
        raise ValueError(f"no key for {', '.join(algorithms)}")
    return KeySet(keys)


def _keys(row: Mapping[str, Any], algorithms: Sequence[str]) -> list[tuple[str | None, PyJWK]]:
    """One key for each algorithm that it may be used with, and its name."""
    import jwt
    from cryptography.exceptions import UnsupportedAlgorithm

    if row.get("kty") in ("RSA", "EC", "OKP") and "d" in row:
        raise ValueError("it holds a private key; publish only public keys")
    kid, operations = row.get("kid"), row.get("key_ops", ["verify"])
    if not isinstance(kid, str | None) or row.get("use", "sig") != "sig":
        return []
    if not isinstance(operations, list) or "verify" not in operations:
        return []
    found = []
    for algorithm in algorithms:
        kty, curve = ALGORITHMS[algorithm]
        if row.get("alg", algorithm) != algorithm or row.get("kty") != kty:
            continue
        if row.get("crv") != curve or not _is_small(row):
            continue
        try:
            key = jwt.PyJWK(dict(row), algorithm)
        except (jwt.PyJWTError, UnsupportedAlgorithm, ValueError, TypeError):
            continue
        if kty != "RSA" or _is_sound_rsa(key):
            found.append((kid, key))
    return found


def _is_small(row: Mapping[str, Any]) -> bool:
    """Whether all numbers of the key are texts, and none takes long to read."""
    texts = [row.get(name, "") for name in ("n", "e", "x", "y")]
    return all(isinstance(text, str) and len(text) <= _MAX_NUMBER_TEXT for text in texts)


def _is_sound_rsa(key: PyJWK) -> bool:
    numbers = key.key.public_numbers()
    return bool(
        MIN_RSA_BITS <= key.key.key_size <= MAX_RSA_BITS
        and 3 <= numbers.e < _MAX_RSA_EXPONENT
        and numbers.e % 2 == 1
    )


class JwksFile:
    """The key set in a watched file.

    Attributes:
        failures: Number of fetches that failed; files have their own metric.
    """

    failures = 0

    def __init__(self, path: Path, algorithms: Sequence[str], watcher: FileWatcher) -> None:
        self.keys: KeySet | None = None
        self._path, self._algorithms = path, algorithms
        self._read_at = time.monotonic()
        self._watcher = watcher
        self._watch = watcher.watch("jwks", [path], self._load, self._use)

    def start(self) -> None:
        """Do nothing: the watcher runs already."""

    def close(self) -> None:
        """Watch the file no longer."""
        self._watcher.forget(self._watch)

    def miss(self) -> None:
        """Do nothing for a token that names an unknown key: the file is watched."""

    def age_seconds(self) -> float | None:
        """The time since the key set was read."""
        return time.monotonic() - self._read_at

    def _load(self, contents: Contents) -> KeySet:
        try:
            content = contents[0].read()
        except OSError as error:
            raise UsageError(f"jwks '{self._path}' cannot be read ({error.strerror})") from error
        if len(content) > MAX_DOCUMENT_BYTES:
            raise UsageError(f"jwks '{self._path}' is larger than {MAX_DOCUMENT_BYTES} bytes")
        try:
            return parse(content, self._algorithms)
        except ValueError as error:
            raise UsageError(f"jwks '{self._path}': {error}") from error

    def _use(self, keys: KeySet) -> None:
        self.keys, self._read_at = keys, time.monotonic()


class JwksUrl:
    """The key set at a URL, fetched by a thread with an event loop of its own.

    Attributes:
        keys: Written by the thread only, as the other attributes are.
        failures: Number of fetches that failed.
    """

    #: Least time between two fetches, as anybody can make tokens that name unknown keys.
    MIN_SECONDS = 10.0
    FETCH_SECONDS = 10.0

    def __init__(
        self, url: str, tls: ssl.SSLContext, algorithms: Sequence[str], refresh_seconds: float
    ) -> None:
        self.keys: KeySet | None = None
        self.failures = 0
        self._url, self._tls, self._algorithms = url, tls, algorithms
        self._name = f"jwks {url}"
        self._forget_authorities: Callable[[], None] = lambda: None
        self._refresh_seconds = refresh_seconds
        self._content = b""
        self._fetched_at: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wanted, self._closed = asyncio.Event(), asyncio.Event()

    def follow_authorities(
        self, watcher: FileWatcher, path: Path, load: Callable[[Contents], ssl.SSLContext]
    ) -> None:
        """Trust the certificates in a watched file instead of the system's."""
        watch = watcher.watch("jwks_ca", [path], load, self._trust)
        self._forget_authorities = lambda: watcher.forget(watch)

    def _trust(self, tls: ssl.SSLContext) -> None:
        self._tls = tls

    def start(self) -> None:
        """Begin to fetch; until then, a worker uses the keys that its parent has."""
        content = FILES.passed_on(self._name)
        if content is not None:
            with contextlib.suppress(ValueError):  # the table may be a new one
                self.keys = parse(content, self._algorithms)
        FILES.pass_on(self._name, None)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, args=(self._loop,), name="jwks", daemon=True).start()

    def close(self) -> None:
        """End the thread, and watch no file any longer."""
        self._forget_authorities()
        self._call(self._closed.set)

    def miss(self) -> None:
        """Fetch soon: a token names an unknown key."""
        if not self._wanted.is_set():
            self._call(self._wanted.set)

    def age_seconds(self) -> float | None:
        """The time since the last successful fetch; None before the first."""
        return None if self._fetched_at is None else time.monotonic() - self._fetched_at

    def _call(self, change: Callable[[], None]) -> None:
        """Call ``change`` in the thread, unless that has ended."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(change)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._follow())

    async def _follow(self) -> None:
        """Fetch until closed."""
        fetching = asyncio.create_task(self._fetch_repeatedly())
        await self._closed.wait()
        fetching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await fetching

    async def _fetch_repeatedly(self) -> None:
        failed = 0
        while True:
            self._wanted.clear()
            failed = 0 if await self._fetch() else failed + 1
            seconds = self._refresh_seconds
            if failed:  # sooner, and not all gateways at a time
                seconds = min(seconds, 2.0 ** min(failed, 10)) * random.uniform(0.75, 1.25)
            await asyncio.sleep(min(seconds, self.MIN_SECONDS))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(seconds - self.MIN_SECONDS, 0.0)):
                    await self._wanted.wait()

    async def _fetch(self) -> bool:
        """Fetch and use the key set; return whether there was one."""
        try:
            content = await download(self._url, MAX_DOCUMENT_BYTES, self.FETCH_SECONDS, self._tls)
            if content != self._content:  # the same keys keep the cache of verified tokens
                self.keys = parse(content, self._algorithms)
                self._content = content
                FILES.pass_on(self._name, content)
        except Exception as error:  # else nothing would ever be fetched again
            self.failures += 1
            kept = "no keys" if self.keys is None else "the old keys"
            unexpected = None if isinstance(error, ModelportError | ValueError) else error
            reason = first_line(error)
            log.warning(
                "jwks not refreshed", url=self._url, reason=reason, kept=kept, exc_info=unexpected
            )
            return False
        self._fetched_at = time.monotonic()
        return True
