"""The settings of recorded traffic, from the options of ``modelport serve``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from modelport.gateway.recording import record_encryption
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.settings import RecordSettings


def record_shares(ctx: Any, param: Any, values: tuple[str, ...]) -> Mapping[str, float]:
    """Parse ``[MODEL=]SHARE``; the share of all models is that of the empty name."""
    shares: dict[str, float] = {}
    for value in values:
        model, _, text = value.rpartition("=")
        try:
            share = float(text)
        except ValueError:
            share = -1.0
        if not 0.0 <= share <= 1.0:
            raise click.BadParameter(f"'{value}' is not a share; write 0.1, or MODEL=0.1")
        if model in shares:
            whose = f"of '{model}'" if model else "of all models"
            raise click.BadParameter(f"the share {whose} is given twice; give it once")
        shares[model] = share
    return shares


def record_settings(options: dict[str, Any]) -> RecordSettings | None:
    """Take the options of records out of those of ``serve``, and check them."""
    target: Path | Location | None = options.pop("record")
    shares = dict(options.pop("record_samples"))
    defaults = RecordSettings(Path())
    made = RecordSettings(
        Path() if target is None else target,
        shares.pop("", defaults.sample),
        shares,
        tuple(options.pop("record_headers")),
        tuple(options.pop("record_redact")),
        tuple(options.pop("record_hash")),
        _key(options.pop("record_hash_key"), "--record-hash-key"),
        _key(options.pop("record_key"), "--record-key"),
        options.pop("record_max_request_bytes"),
        options.pop("record_rotate_bytes"),
        options.pop("record_rotate_seconds"),
        options.pop("record_max_bytes"),
    )
    if target is None:
        if made != defaults:
            raise click.UsageError("the options --record-... need --record DIR")
        return None
    if bool(made.hashed) != bool(made.hash_key):
        raise click.UsageError("--record-hash and --record-hash-key FILE need each other")
    if made.rotate_bytes * 2 > made.max_bytes and isinstance(target, Path):
        raise click.UsageError(
            f"--record-max-size {made.max_bytes} is less than two files of --record-rotate-size "
            f"{made.rotate_bytes}; give smaller files"
        )
    return made


def _key(path: Path | None, option: str) -> bytes:
    return b"" if path is None else record_encryption.read_key(Path(path), option)
