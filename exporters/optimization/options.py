"""Options of graph optimisation and quantisation, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.registry import Format
from modelport.exporters.loaded_model import Source
from modelport.gateway.errors import Unsupported, UsageError

LEVELS = ("O1", "O2", "O3")
METHODS = ("minmax", "entropy", "percentile")
BLOCK_SIZES = (16, 32, 64, 128, 256)
WEIGHT_ONLY = ("int4", "int8-weight-only")


@dataclass(frozen=True, slots=True)
class OptimizationOptions:
    """The options of ``modelport export`` for a graph; None takes the default.

    Attributes:
        level: of ``--optimize``.
        calibrate: files of inputs for static int8 quantisation.
    """

    level: str | None = None
    calibrate: tuple[Path, ...] = ()
    calibration_method: str | None = None
    per_channel: bool | None = None
    block_size: int | None = None

    def check(self, rows: Sequence[Format], quantize: str | None) -> None:
        """Refuse unknown values, and combinations without a meaning.

        Raises:
            UsageError, Unsupported: the message names the option.
        """
        _check_known("--optimize", self.level, LEVELS)
        _check_known("--calibration-method", self.calibration_method, METHODS)
        if self.block_size is not None and self.block_size not in BLOCK_SIZES:
            raise UsageError(
                f"--block-size {self.block_size} is not supported; use "
                f"{', '.join(map(str, BLOCK_SIZES))}"
            )
        int8, blocks = quantize == "int8", quantize in WEIGHT_ONLY
        given = {
            "--optimize": self.level is not None,
            "--calibrate": bool(self.calibrate),
            "--calibration-method": self.calibration_method is not None,
            "--per-channel": self.per_channel is not None,
            "--block-size": self.block_size is not None,
        }
        others = [row.name for row in rows if not row.optimizer]
        for option in (option for option, is_given in given.items() if is_given and others):
            raise UsageError(f"{option} is for ONNX only; omit --format {' '.join(others)}")
        for option, fits, needs in (
            ("--calibrate", int8, "--quantize int8"),
            ("--calibration-method", bool(self.calibrate), "--calibrate"),
            ("--per-channel", int8, "--quantize int8"),
            ("--block-size", blocks, f"--quantize {' or '.join(WEIGHT_ONLY)}"),
        ):
            if given[option] and not fits:
                raise UsageError(f"{option} has no effect without {needs}")

    def applied(self, target: ExportTarget, source: Source) -> ExportTarget:
        """``target`` with these options; reads the calibration data.

        Raises:
            UsageError: the calibration data does not fit the model.
        """
        data = None
        if self.calibrate:
            from modelport.exporters.optimization import calibration

            data = calibration.read(self.calibrate, source)
        return replace(
            target,
            optimize=self.level,
            calibration=data,
            calibration_method=self.calibration_method or target.calibration_method,
            per_channel=target.per_channel if self.per_channel is None else self.per_channel,
            block_size=self.block_size or target.block_size,
        )


def _check_known(option: str, value: str | None, known: Sequence[str]) -> None:
    if value is not None and value not in known:
        hint = "; fp16 is --dtype fp16" if value == "O4" else ""
        raise Unsupported(f"{option} '{value}' is not supported; use {', '.join(known)}{hint}")
