"""The contract of a format: the target of an export, and an opened artifact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from modelport.gateway.types import Array

if TYPE_CHECKING:
    from modelport.exporters.optimization.calibration import CalibrationData


class ParitySession(Protocol):
    """An exported artifact, opened by the runtime that will serve it."""

    @property
    def inputs(self) -> Sequence[str]: ...

    @property
    def outputs(self) -> Sequence[str]: ...

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]: ...


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """The precision and operator set to write an artifact in.

    Inputs and outputs keep the signature's datatypes at every precision.

    Attributes:
        dtype: of weights and arithmetic: ``fp32``, ``fp16`` or ``bf16``.
        quantize: ``int8``, ``int8-weight-only`` or ``int4`` weights, or None.
        opset: ONNX's operator set; None for other formats.
        optimize: the level of graph optimisation, ``O1`` to ``O3``, or None.
        calibration: inputs for static quantisation; None quantises activations at run time.
        calibration_method: the choice of ranges from them: ``minmax``, ``entropy``, ``percentile``.
        per_channel: int8 weights have a scale for each channel.
        adopted: the artifact is a file from elsewhere, which is not changed.
        block_size: number of weights that share a scale where weights alone are quantised.
        device: torch's name of the device that AOTInductor compiles for.
    """

    dtype: str = "fp32"
    quantize: str | None = None
    opset: int | None = None
    optimize: str | None = None
    calibration: CalibrationData | None = None
    calibration_method: str = "minmax"
    per_channel: bool = True
    block_size: int = 32
    adopted: bool = False
    device: str = "cpu"

    @property
    def precision(self) -> str:
        return self.quantize or self.dtype

    @property
    def converted(self) -> ExportTarget:
        """The target of the conversion, before the graph is optimised and quantised."""
        return ExportTarget("fp32" if self.optimize else self.dtype, opset=self.opset)
