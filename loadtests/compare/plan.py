"""The combinations to compare: format, precision and backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from modelport.gateway.backend_registry import BACKENDS as DESCRIPTORS
from modelport.gateway.backend_registry import platforms
from modelport.gateway.errors import UsageError
from modelport.loadtests.load.target import LoadTestProtocol


@dataclass(frozen=True)
class Variant:
    """One artifact of the checkpoint, in the terms of ``modelport export``."""

    format: str
    precision: str = "fp32"
    #: The level of graph optimisation; empty: none.
    optimize: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.format, self.precision, self.optimize)))

    @property
    def slug(self) -> str:
        return f"{self.format}-{self.suffix}"

    @property
    def suffix(self) -> str:
        """The part of the slug that the formats of one export share."""
        return "-".join(filter(None, (self.precision, self.optimize)))

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of ``modelport export`` for the precision and the optimisation."""
        level = ("--optimize", self.optimize) if self.optimize else ()
        if self.precision == "fp32":
            return level
        return ("--quantize" if self.precision in QUANTIZED else "--dtype", self.precision, *level)


#: In the order of the report.
VARIANTS = (
    Variant("onnx"),
    Variant("onnx", "int8"),
    Variant("torchscript"),
    Variant("savedmodel"),
    Variant("tflite"),
    Variant("tflite", "int8"),
    Variant("openvino"),
    Variant("pt2"),
)
QUANTIZED = ("int8", "int8-weight-only", "int4")
PRECISIONS = ("fp32", "fp16", "bf16", *QUANTIZED)
LEVELS = ("O1", "O2", "O3")
#: Embedded backends of the gateway by format, those of installed extensions included.
EMBEDDED: Mapping[str, str] = {each.format: each.backend for each in platforms()}
FORMATS = tuple(EMBEDDED)
#: Formats that ``modelport package`` writes, by server.
SERVERS: Mapping[str, str] = {
    "torchserve": "torchscript",
    "triton": "onnx",
    "tfserving": "savedmodel",
}
BACKENDS = (*dict.fromkeys(EMBEDDED.values()), *SERVERS)
TITLES: Mapping[str, str] = {name: each.title for name, each in DESCRIPTORS.all().items()}
#: Protocols for servers that do not speak the requested one, by transport.
NATIVE_HTTP = (LoadTestProtocol.TORCHSERVE_HTTP, LoadTestProtocol.TFSERVING_HTTP)
NATIVE_GRPC = (LoadTestProtocol.TORCHSERVE_GRPC, LoadTestProtocol.TFSERVING_GRPC)


@dataclass(frozen=True)
class Entry:
    """A variant on a backend."""

    variant: Variant
    backend: str

    @property
    def direct(self) -> bool:
        return self.backend in SERVERS

    @property
    def name(self) -> str:
        return f"{self.variant} · {TITLES[self.backend]}"


def entries(formats: Sequence[str] = (), backends: Sequence[str] = ()) -> list[Entry]:
    """All combinations to compare, in the order of the report.

    Args:
        formats: ``onnx``, or with a precision or an optimisation, ``onnx:int8``, ``onnx:O2``,
            ``onnx:int8:O2``; none: ``VARIANTS``.
        backends: of ``BACKENDS``; none: all.

    Raises:
        UsageError: a value is unknown, or no combination is left.
    """
    variants = [parse(text) for text in formats] or list(VARIANTS)
    wanted = list(backends) or list(BACKENDS)
    for name in wanted:
        if name not in BACKENDS:
            raise UsageError(f"--backend '{name}' is unknown; use {', '.join(BACKENDS)}")
    found = [
        Entry(variant, EMBEDDED[variant.format])
        for variant in variants
        if EMBEDDED[variant.format] in wanted
    ]
    found += [
        Entry(variant, server)
        for server, kind in SERVERS.items()
        for variant in variants
        if server in wanted and variant == Variant(kind)
    ]
    if not found:
        raise UsageError(
            f"no backend of {', '.join(wanted)} runs {', '.join(map(str, variants))}; widen "
            "--format or --backend"
        )
    return list(dict.fromkeys(found))


def parse(text: str) -> Variant:
    """Parse ``FORMAT[:PRECISION][:LEVEL]``.

    Raises:
        UsageError: it is something else.
    """
    name, *rest = text.split(":")
    level = rest.pop() if rest and rest[-1] in LEVELS else ""
    precision = rest.pop() if rest else "fp32"
    if rest or name not in FORMATS or precision not in PRECISIONS:
        raise UsageError(
            f"--format '{text}' is not FORMAT[:PRECISION][:LEVEL]; formats are "
            f"{', '.join(FORMATS)}, precisions {', '.join(PRECISIONS)}, levels of --optimize "
            f"{', '.join(LEVELS)}"
        )
    return Variant(name, precision, level)


def protocol_for(
    wanted: LoadTestProtocol, spoken: Mapping[LoadTestProtocol, object]
) -> LoadTestProtocol | None:
    """The wanted protocol, or the server's own one on the same transport."""
    native = NATIVE_GRPC if wanted.is_grpc else NATIVE_HTTP
    return next((protocol for protocol in (wanted, *native) if protocol in spoken), None)
