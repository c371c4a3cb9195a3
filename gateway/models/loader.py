"""The blocking part of a load: verify the version, find its backend, load it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from modelport.gateway.backend_registry import BACKENDS, PYTHON
from modelport.gateway.backends import base
from modelport.gateway.backends.backend_host import Host
from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.python import python_based
from modelport.gateway.errors import InvalidArgument, ModelportError, Unsupported
from modelport.gateway.inference import image_decoding
from modelport.gateway.inference.cache import ResponseCache
from modelport.gateway.inference.pipeline import SharedState
from modelport.gateway.inference.rate_limiter import RateLimiter, is_limited
from modelport.gateway.inference.text import text_infer
from modelport.gateway.inference.text.text_infer import TextInterface
from modelport.gateway.models import model_warmup, sent_files
from modelport.gateway.models.model import ServedVersion
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import config_schema, manifest
from modelport.gateway.repository.config import ENSEMBLE, ModelConfig
from modelport.gateway.repository.file_states import VersionFiles
from modelport.gateway.repository.scan import ModelEntry, VersionEntry
from modelport.gateway.settings import PythonModels, Settings, request_memory_bytes
from modelport.gateway.telemetry import Statistics

if TYPE_CHECKING:
    from modelport.gateway.repository.signing_keys import PublicKey

log = structlog.get_logger("modelport.models")

#: Unknown parameters of a version that are logged, and characters of each.
MAX_WARNINGS, MAX_QUOTED = 32, 256


class VersionLoader:
    """Loads versions. Called in threads; touches no state of the event loop."""

    def __init__(
        self, settings: Settings, find_backend: Callable[[str], base.BackendLoader], threads: int
    ) -> None:
        self._settings = settings
        self._find_backend = find_backend
        self._threads = threads
        #: Each worker has its share of the cache.
        cache_bytes = settings.cache_bytes // settings.workers
        limits = settings.rate_limits
        self.shared = SharedState(
            ResponseCache(cache_bytes) if cache_bytes else None,
            rate_limiter=RateLimiter(limits) if limits is not None else None,
        )
        #: Set before the first load.
        self.host: Host | None = None

    def load(
        self, entry: ModelEntry, version: VersionEntry, config: ModelConfig, statistics: Statistics
    ) -> ServedVersion:
        """Verify and load ``version``.

        Raises:
            Exception: the load failed; a ``ModelportError`` has a public reason.
        """
        name, number = entry.name, version.number
        keys = self._settings.require_signature
        if version.problem:
            raise InvalidArgument(version.problem)
        if keys and config.platform == ENSEMBLE:
            raise Unsupported(
                "an ensemble has no signature, and --require-signature is set; call the signed "
                "models of its steps, or serve it from a gateway without --require-signature"
            )
        route = self._settings.routes.get(name)
        here = route is None
        sent = sent_files.is_sent(entry.path)  # a folder that nobody else writes to
        watched = here and not (keys or entry.remote or sent)
        before = VersionFiles(entry, version) if watched else None
        if entry.remote or (config.platform == ENSEMBLE and not version.fingerprint):
            keys = ()  # nothing to verify
        elif not manifest.verify(version.path):
            if self._settings.require_manifest:
                raise InvalidArgument(
                    "no manifest.json, and --require-manifest is set; publish the version with "
                    "'modelport export'"
                )
            if not keys:
                log.warning("no manifest.json: served unverified", model=name, version=number)
        if here and self._settings.disable_auto_complete_config:
            config_schema.check_complete(config)
        try:
            image_decoding.check_installed(config)
        except Unsupported as error:  # its tensors are served all the same
            log.warning(
                "requests with images will be refused",
                model=name,
                version=number,
                reason=str(error),
            )
        load = self._find_backend(self._backend(config) if route is None else route.backend)
        may_run_code = bool(keys) or sent_files.may_run_code(entry.path)
        with _verified(version.path, entry.repository_name, config, keys, here) as (path, config):
            artifact = Artifact(
                name, number, path, config, self._threads, route, self.host,
                native=bool(keys) or (may_run_code and self._settings.allow_native_code),
                python=self._python(signed=bool(keys)) if may_run_code else None,
                copied=sent or path != version.path,
            )  # fmt: skip
            try:
                backend = load(artifact)
            except ModelportError as error:
                if may_run_code:
                    raise
                raise type(error)(
                    f"{error} (files of a load request run code only with rules of --access, or "
                    "with a signature and --require-signature)"
                ) from error
            try:
                if before is not None:
                    before.check()
                text = (
                    _text(path, backend.config, log.bind(model=name, version=number))
                    if here and not backend.config.HasField("sequence_batching")
                    else None
                )
                served = ServedVersion(entry, number, backend, statistics, self.shared, text)
                _warn(served, elsewhere=route is not None)
                if self.shared.rate_limiter is None and is_limited(backend.config):
                    log.warning(
                        "rate_limiter has no effect without --rate-limit=execution_count",
                        model=name, version=number,
                    )  # fmt: skip
                if here:
                    self._warm_up(served, entry)
                return served
            except BaseException:
                backend.unload()
                raise

    def _backend(self, config: ModelConfig) -> str:
        """The backend that serves ``config``; those of the gateway come first."""
        backend: str = config.backend
        directory = self._settings.python_models.backends
        based = directory is not None and backend not in BACKENDS.names()
        return PYTHON.backend if based and python_based.folder_of(backend, directory) else backend

    def _python(self, signed: bool) -> PythonModels | None:
        """The limits of Python models; None: they are refused."""
        settings = self._settings
        if not (signed or settings.allow_python):
            return None
        return settings.python_models._replace(
            load_seconds=settings.model_load_timeout_seconds,
            most_bytes=request_memory_bytes(settings),
            completes=not settings.disable_auto_complete_config,
        )

    def _warm_up(self, version: ServedVersion, entry: ModelEntry) -> None:
        if version.config.model_warmup:
            assert self.host is not None
            settings = self._settings
            model_warmup.run(
                version, entry, self.host.loop, request_memory_bytes(settings),
                settings.model_load_timeout_seconds,
            )  # fmt: skip


def _text(path: Path, config: ModelConfig, told: Any) -> TextInterface | None:
    """The text interface of the version in ``path``; its tensors are served without it, too."""
    try:
        return text_infer.load(path, configuration.signature(config))
    except Unsupported as error:
        told.warning("requests with texts will be refused", reason=str(error))
        return None


def _warn(version: ServedVersion, elsewhere: bool) -> None:
    """Log fields and parameters without effect, unless the model's own server may read them."""
    told = log.bind(model=version.name, version=version.number)
    fields = [] if elsewhere else config_schema.without_effect(version.config)
    if fields:
        described = "; ".join(f"{path}: {reason}" for path, reason in fields)
        told.warning("fields of config.pbtxt have no effect", fields=described)
    unknown = config_schema.unknown_parameters(version.config, elsewhere)
    for key, near in islice(unknown, MAX_WARNINGS):
        hint = {"did_you_mean": near} if near else {}
        told.warning("unknown parameter in config.pbtxt", parameter=key[:MAX_QUOTED], **hint)


@contextmanager
def _verified(
    version: Path, name: str, config: ModelConfig, keys: Sequence[PublicKey], here: bool
) -> Iterator[tuple[Path, ModelConfig]]:
    """The folder to load ``version`` from, and the configuration to load it with.

    Args:
        name: the model's name in the certificate.
        here: this gateway loads the files.
    """
    if not keys and not (here and os.path.lexists(version / manifest.CERTIFICATE)):
        yield version, config
        return
    from modelport.gateway.repository import signed_config, signing

    if not keys:
        certificate = signing.read_certificate(version, name)
        signed_config.check_format(config, certificate, required=False)
        yield version, config
        return
    certificate = signing.verify_signature(version, name, keys)
    if here:
        signed_config.check_format(config, certificate, required=True)
        config = signed_config.apply(config, certificate)
    with signing.verified_copy(version, certificate) as copy:
        yield copy, config
