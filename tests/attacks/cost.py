"""The cost of every request: CPU, memory and the event loop's longest stall, against one rule.

    python -m tests.attacks.cost [--requests N] [--unread N] [--sizes N,N] [--match PATTERN]

Routes come from the server's own OpenAPI document and methods from its table of gRPC methods, so a
new one is tried without being listed. Their bodies are made of what is known to be dear to somebody
(``FILLINGS``) in every place that a body has for it (``PLACES``), in several sizes and codings; of
a gRPC message, in every field. A request that costs more than its bytes deserve is a finding.

Then come responses that nobody reads, see ``unread``.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import http.client
import io
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from PIL import Image

from modelport.gateway.inference.shared_memory import SharedMemoryRegions
from modelport.gateway.models.inference_service import InferenceService
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.dialects import Dialects
from modelport.gateway.protocols.oip.shared_memory import SharedMemory
from modelport.gateway.settings import Settings, TraceConfig
from modelport.gateway.telemetry.request_record import RequestObserver
from modelport.gateway.telemetry.tfserving_counters import TfServingRequests
from modelport.gateway.telemetry.tracer import Tracer
from tests import models, processor
from tests.server import Gateway, serving

#: The rule: what a request of n bytes may cost, where n counts after decompression. The constant is
#: that of the smallest request: routing, the response, the threads that it wakes.
CPU_SECONDS, CPU_SECONDS_PER_BYTE = 0.015, 600e-9
MEMORY_BYTES, MEMORY_PER_BYTE = 2**20, 8
#: Allocators keep more than is asked for, and threads have stacks.
NOISE_BYTES = 24 * 2**20
STALL_SECONDS = 0.020
MAX_INPUT_BYTES = 16 * 2**20
SIZES = (1_000, 40_000, 1_000_000, 8_000_000)
MODELS = ("x2", "open", "words", "pictures", "missing")
SECONDS = 60.0

FILLINGS: dict[str, bytes] = {
    "zeros": b"0,",
    "fractions": b"1.5,",
    "not numbers": b"NaN,",
    "rows": b"[1,2],",
    "empty rows": b"[],",
    "empty strings": b'"",',
    "strings": b'"ab",',
    "nulls": b"null,",
    "objects": b"{},",
    "members": b'{"x":1},',
    "base64": b'{"b64":"AAAA"},',
    "escapes": b'"\\u0041",',
}
#: What a body is but for its filling: beginning, end, content type.
PLACES: dict[str, tuple[bytes, bytes, str]] = {
    "oip": (b'{"inputs":[{"name":"x","datatype":"FP32","shape":[9],"data":[', b"0]}]}", ""),
    "oip text": (b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[9],"data":[', b'""]}]}', ""),
    "inputs": (b'{"inputs":[', b"0]}", ""),
    "outputs": (b'{"inputs":[],"outputs":[', b"0]}", ""),
    "parameters": (b'{"parameters":{"a":[', b"0]}}", ""),
    "by name": (b'{"x":[', b"0]}", ""),
    "instances": (b'{"instances":[', b"0]}", ""),
    "named instances": (b'{"instances":[{"x":[', b"0]}]}", ""),
    "examples": (b'{"examples":[', b"{}]}", ""),
    "feature": (b'{"examples":[{"x":[', b"0]}]}", ""),
    "context": (b'{"context":{"x":[1]},"examples":[', b"{}]}", ""),
    "data": (b'{"data":[', b"0]}", "application/json"),
    "bare": (b"[", b"0]", "application/json"),
    "string": (b'{"x":"', b'"}', "application/json"),
    "key": (b'{"', b'":1}', "application/json"),
    "form": (b"data=", b"", "application/x-www-form-urlencoded"),
    "form name": (b"", b"=1", "application/x-www-form-urlencoded"),
    "multipart": (
        b'--b\r\nContent-Disposition: form-data; name="data"\r\n\r\n',
        b"\r\n--b--\r\n",
        "multipart/form-data; boundary=b",
    ),
    "raw": (b"", b"", "application/octet-stream"),
}
#: Fillings of places that hold no JSON values.
RAW: dict[str, bytes] = {
    "nul": b"\0\0\0\0",
    "short": b"\x02\0\0\0ab",
    "line ends": b"\r\n",
    "escapes": b"%41",
    "backslashes": b"\\\\",
    "brackets": b"[",
    "spaces": b" ",
    "quotes": b'\\"',
}
#: Whole pictures, by name: for a model of 8 x 8 pixels, all of them small.
PIXELS = 1 << 22


def _picture(kind: str, width: int, height: int, **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (width, height), 90).save(stream, kind, **options)
    return stream.getvalue()


def pictures() -> dict[str, bytes]:
    sides = [(1, PIXELS), (PIXELS, 1), (2048, 2048), (512, 512), (3, 60_000), (8, 8)]
    found = {f"PNG {w} x {h}": _picture("PNG", w, h) for w, h in sides}
    for side in (8, 400, 1000, 4000):
        for progressive in (False, True):
            data = _picture("JPEG", side, side, progressive=progressive)
            found[f"JPEG {side}, {progressive}"] = data
            head, *scans = data.split(b"\xff\xda")
            cut = b"\xff\xda".join([head, *(scan[:9] for scan in scans)])
            found[f"cut JPEG {side}, {progressive}"] = cut + b"\xff\xd9"
            found[f"JPEG {side}, {progressive}, of markers"] = data[:-2] + b"\xff" * 60_000
    return found


OPAQUE = ("string", "key", "form", "form name", "multipart", "raw")


class CostlyRequest(NamedTuple):
    """One request."""

    name: str
    size: int
    send: Callable[[], int]


class Cost(NamedTuple):
    cpu_seconds: float
    memory_bytes: int
    stall_seconds: float
    answer_bytes: int


class Meter:
    """Processor time and memory of the server process."""

    def __init__(self, pid: int) -> None:
        self._root = Path(f"/proc/{pid}")

    def cpu_seconds(self) -> float:
        return self._sum(0)

    def waited_seconds(self) -> float:
        """Time that runnable threads waited for a processor, which the machine causes."""
        return self._sum(1)

    def _sum(self, column: int) -> float:
        total = 0
        for task in (self._root / "task").iterdir():
            try:
                total += int((task / "schedstat").read_text().split()[column])
            except OSError:
                continue  # the thread has ended
        return total / 1e9

    def reset_peak(self) -> int:
        """Returns what is held now."""
        (self._root / "clear_refs").write_text("5")
        return self._status("VmRSS")

    def peak_bytes(self) -> int:
        return self._status("VmHWM")

    def _status(self, key: str) -> int:
        for line in (self._root / "status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
        raise AssertionError(key)


class LivenessProbe:
    """A process that asks for ``/v2/health/live`` all the time, and notes the longest answer.

    Of the time an answer took, no more counts than the server computed meanwhile, and not what its
    threads or the probe waited for a processor: a machine that is busy answers late, too.
    """

    def __init__(self, gateway: Gateway) -> None:
        context = multiprocessing.get_context("spawn")
        self._longest, self._answers = context.Value("d", 0.0), context.Semaphore(0)
        arguments = (gateway.process.pid, gateway.http_port, self._longest, self._answers)
        self._process = context.Process(target=_probe, args=arguments, daemon=True)
        self._process.start()

    def take(self) -> float:
        """Return the longest since the last call, with that of the request now in flight."""
        while self._answers.acquire(block=False):
            pass
        assert self._answers.acquire(timeout=SECONDS), "nobody answers the probe"
        with self._longest.get_lock():
            longest, self._longest.value = self._longest.value, 0.0
        return float(longest)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        assert self._process.pid is not None
        self.take()
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)
            self.take()  # the longest is the pause

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _probe(pid: int, port: int, longest: Any, answers: Any) -> None:
    server, own = Meter(pid), Meter(os.getpid())
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.suppress(OSError, http.client.HTTPException):  # the server has ended
        while True:
            waited, cpu = server.waited_seconds() + own.waited_seconds(), server.cpu_seconds()
            started = time.perf_counter()
            connection.request("GET", "/v2/health/live")
            connection.getresponse().read()
            elapsed = time.perf_counter() - started
            used = server.cpu_seconds() - cpu
            late = elapsed - (server.waited_seconds() + own.waited_seconds() - waited)
            with longest.get_lock():
                longest.value = max(longest.value, min(late, used))
            answers.release()
            time.sleep(0.002)


# -- what is sent ----------------------------------------------------------------------------------


def filled(place: str, filling: bytes, size: int) -> bytes:
    before, after, _ = PLACES[place]
    return before + filling * max(1, (size - len(before) - len(after)) // len(filling)) + after


def fillings(place: str) -> dict[str, bytes]:
    return RAW if place in OPAQUE else FILLINGS


def fair_bytes(sent: int, plain: int) -> int:
    """The bytes that count: those that were sent, or what they inflate to within the limit."""
    return max(sent, min(plain, MAX_INPUT_BYTES))


def routes(gateway: Gateway, wanted: Sequence[str] = ("post", "put")) -> list[tuple[str, str]]:
    """Method and path of every route with a wanted method, as the server documents them."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.http_port, timeout=60)
    connection.request("GET", "/openapi.json")
    paths = json.loads(connection.getresponse().read())["paths"]
    connection.close()
    found = [
        (method.upper(), path)
        for path, operations in paths.items()
        for method in operations
        if method in wanted
    ]
    return sorted(found)


def methods() -> list[tuple[str, str, Any]]:
    """Service, method and request class of every gRPC method."""
    settings = Settings(())
    manager = ModelManager(settings)
    control: Any = _NoControl()
    shared = SharedMemory(SharedMemoryRegions(False), control, 1)
    service = InferenceService(manager)
    tracer = Tracer(TraceConfig(), RequestObserver())
    host = DialectHost(settings, service, manager, control, shared, TfServingRequests(), tracer)
    table = Dialects(host).grpc
    found = []
    for service, rows in table.items():
        found += [(service, name, row) for name, row in rows.items()]
    return found


class _NoControl:
    def register(self, *_: Any, **__: Any) -> None:
        """Nobody asks."""


def http_attacks(gateway: Gateway, sizes: Sequence[int] = SIZES) -> Iterator[CostlyRequest]:
    """Without end of combinations: a sample of them is taken."""
    for (method, path), model, place in itertools.product(routes(gateway), MODELS, PLACES):
        if "{model}" not in path and model != MODELS[0]:
            continue
        target = path.replace("{model}", model).replace("{version}", "1").replace("{label}", "a")
        if "{" in target:
            target = target.replace("{region}", "r").replace("{", "").replace("}", "")
        for (name, filling), size, coding in itertools.product(
            fillings(place).items(), sizes, ("identity", "gzip", "deflate", "chunked")
        ):
            yield _http(gateway, method, target, place, name, filling, size, coding)


def picture_attacks(gateway: Gateway) -> Iterator[CostlyRequest]:
    """Pictures, whose cost is bounded by the model's input, on the routes that take them."""
    raw, plain = (
        {"Inference-Header-Content-Length": "0"},
        {"Content-Type": "application/octet-stream"},
    )
    for name, data in pictures().items():
        packed = gzip.compress(data)
        for path, headers in (
            ("/predictions/pictures", plain),
            ("/v2/models/pictures/infer", plain | raw),
        ):
            for body, coding in ((data, {}), (packed, {"Content-Encoding": "gzip"})):
                send = partial(_post, gateway, path, body, headers | coding)
                title = f"POST {path} picture of {name}, {len(body)} bytes, {coding}"
                yield CostlyRequest(title, fair_bytes(len(body), len(data)), send)


def _post(gateway: Gateway, path: str, body: bytes, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.http_port, timeout=SECONDS)
    try:
        connection.request("POST", path, body, headers)
        return len(connection.getresponse().read())
    finally:
        connection.close()


def _http(
    gateway: Gateway, method: str, path: str, place: str, name: str, filling: bytes,
    size: int, coding: str,
) -> CostlyRequest:  # fmt: skip
    def send() -> int:
        body = filled(place, filling, size)
        headers = {"Content-Type": PLACES[place][2]} if PLACES[place][2] else {}
        if place == "raw":
            headers["Inference-Header-Content-Length"] = "0"
        if coding in ("gzip", "deflate"):
            body = gzip.compress(body, 6) if coding == "gzip" else zlib.compress(body)
            headers["Content-Encoding"] = coding
        connection = http.client.HTTPConnection("127.0.0.1", gateway.http_port, timeout=SECONDS)
        try:
            pieces = (body[at : at + 8192] for at in range(0, len(body), 8192))
            content: Any = pieces if coding == "chunked" else body
            connection.request(method, path, content, headers, encode_chunked=coding == "chunked")
            return len(connection.getresponse().read())
        except (http.client.HTTPException, OSError):
            return 0  # it was answered before all was sent
        finally:
            connection.close()

    plain = size
    sent = size if coding in ("identity", "chunked") else size // 1000 + 100
    title = f"{method} {path} {place} of {name}, {size} bytes, {coding}"
    return CostlyRequest(title, fair_bytes(sent, plain), send)


def grpc_attacks(gateway: Gateway, sizes: Sequence[int] = SIZES) -> Iterator[CostlyRequest]:
    for (service, name, row), model in itertools.product(methods(), MODELS):
        if row.health or name == "ServerMetadata":
            continue
        for field, size, packed in itertools.product(
            field_paths(row.request.DESCRIPTOR), sizes, (False, True)
        ):
            yield _grpc(gateway, service, name, row, model, field, size, packed)


def field_paths(kind: Descriptor, depth: int = 4) -> list[tuple[FieldDescriptor, ...]]:
    """Every repeated field, string and map of a message, however deep, as the way to it."""
    if not depth:
        return []
    found: list[tuple[FieldDescriptor, ...]] = []
    for field in kind.fields:
        if field.is_repeated or field.message_type is None:
            found.append((field,))
        if field.message_type is not None:
            found += [(field, *inner) for inner in field_paths(field.message_type, depth - 1)]
    return found


def tagged(field: FieldDescriptor, content: bytes) -> bytes:
    return _varint(field.number << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def message_of(row: Any, model: str, path: tuple[FieldDescriptor, ...], size: int) -> bytes:
    """A message that names ``model`` and repeats the last field of ``path``, empty."""
    *way, last = path
    delimited = last.message_type is not None or last.type in (9, 12)
    one = tagged(last, b"") if delimited else tagged(last, b"\1" * 8)
    content = one * (size // len(one))
    for field in reversed(way):
        content = tagged(field, content)
    head = b""
    for field in row.request.DESCRIPTOR.fields:
        if field.name in ("model_name", "name") and field.type == FieldDescriptor.TYPE_STRING:
            head = tagged(field, model.encode())
        elif field.name == "model_spec":
            head = tagged(field, tagged(field.message_type.fields_by_name["name"], model.encode()))
        elif field.name == "tasks":
            spec = field.message_type.fields_by_name["model_spec"]
            name = spec.message_type.fields_by_name["name"]
            head = tagged(field, tagged(spec, tagged(name, model.encode())))
    return head + content


def _grpc(
    gateway: Gateway, service: str, name: str, row: Any, model: str,
    path: tuple[FieldDescriptor, ...], size: int, packed: bool,
) -> CostlyRequest:  # fmt: skip
    def send() -> int:
        content = message_of(row, model, path, size)
        compression = grpc.Compression.Gzip if packed else grpc.Compression.NoCompression
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        with grpc.insecure_channel(gateway.grpc, options, compression) as opened:
            channel: Any = opened
            target = f"/{service}/{name}"
            try:
                if row.request_streams:
                    replies = channel.stream_stream(target)(iter([content]), timeout=SECONDS)
                elif row.reply_streams:
                    replies = channel.unary_stream(target)(content, timeout=SECONDS)
                else:
                    return len(channel.unary_unary(target)(content, timeout=SECONDS))
                return sum(len(reply) for reply in itertools.islice(replies, 3))
            except grpc.RpcError:
                return 0

    field = ".".join(each.name for each in path)
    coding = "gzip" if packed else "identity"
    sent = size // 1000 + 100 if packed else size
    title = f"{name} of {model}, {field}, {size} bytes, {coding}"
    return CostlyRequest(title, fair_bytes(sent, size), send)


# -- the rule --------------------------------------------------------------------------------------


def measured(gateway: Gateway, meter: Meter, probe: LivenessProbe, attack: CostlyRequest) -> Cost:
    probe.take()
    held, cpu = meter.reset_peak(), meter.cpu_seconds()
    answer = attack.send()
    cpu = meter.cpu_seconds() - cpu
    return Cost(cpu, max(0, meter.peak_bytes() - held), probe.take(), answer)


def again(gateway: Gateway, meter: Meter, probe: LivenessProbe, attack: CostlyRequest) -> Cost:
    """Measure a request that was costly; its CPU while nobody probes, which costs, too."""
    with probe.paused():
        cpu = meter.cpu_seconds()
        attack.send()
        cpu = meter.cpu_seconds() - cpu
    return measured(gateway, meter, probe, attack)._replace(cpu_seconds=processor.scaled(cpu))


def broken(attack: CostlyRequest, cost: Cost) -> list[str]:
    """List the limits that a request exceeds."""
    size = attack.size + cost.answer_bytes
    found = []
    if cost.cpu_seconds > CPU_SECONDS + CPU_SECONDS_PER_BYTE * size:
        found.append(f"{cost.cpu_seconds:.2f} s of CPU for {size} bytes")
    if cost.memory_bytes > MEMORY_BYTES + MEMORY_PER_BYTE * size + NOISE_BYTES:
        found.append(f"{cost.memory_bytes / 1e6:.0f} MB for {size} bytes")
    if cost.stall_seconds > STALL_SECONDS:
        found.append(f"everybody else waited {cost.stall_seconds * 1000:.0f} ms")
    return found


def repository(root: Path) -> Path:
    """A model whose signature is closed, one that is open, one of strings, one of pictures."""
    models.repository(root)
    models.fake(root, "open", "FP32", "-1")
    models.fake(root, "words", "BYTES", "-1")
    text = models.config(
        "pictures", ["x FP32 3,8,8"], ["y FP32 3,8,8"], backend="fake", extra=models.PICTURES
    )
    (root / "pictures" / "1").mkdir(parents=True)
    (root / "pictures" / "config.pbtxt").write_text(text)
    return root


def findings(
    gateway: Gateway,
    requests: int | None,
    seed: int,
    tell: Callable[[str], None] = print,
    sizes: Sequence[int] = SIZES,
    match: str = "",
) -> tuple[int, list[str]]:
    """Send the attacks; return the number of requests and those that exceeded a limit."""
    attacks = [
        *http_attacks(gateway, sizes),
        *grpc_attacks(gateway, sizes),
        *(picture_attacks(gateway) if requests is None or requests > 1000 or match else ()),
    ]
    attacks = [attack for attack in attacks if re.search(match, attack.name)]
    random.Random(seed).shuffle(attacks)
    meter, found = Meter(gateway.process.pid), []
    probe = LivenessProbe(gateway)
    try:
        for number, attack in enumerate(attacks[:requests]):
            wrong = broken(attack, measured(gateway, meter, probe, attack))
            # Once more: threads begin, modules are imported, pages come back.
            if wrong and (wrong := broken(attack, again(gateway, meter, probe, attack))):
                found.append(f"{attack.name}: {'; '.join(wrong)}")
                tell(found[-1])
            if number % 500 == 499:
                tell(f"{number + 1} of {len(attacks)} requests, {len(found)} findings")
    finally:
        probe.close()
    return len(attacks[:requests]), found


def main() -> int:
    from tests.attacks import unread  # it uses this module

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, help="a sample of so many  [default: all]")
    parser.add_argument(
        "--unread", type=int, default=100, help="attacks with unread responses  [default: 100]"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--sizes", default=",".join(map(str, SIZES)), help="of the bodies, in bytes"
    )
    parser.add_argument("--match", default="", metavar="PATTERN", help="only attacks of such names")
    arguments = parser.parse_args()
    sizes = tuple(map(int, arguments.sizes.split(",")))
    with tempfile.TemporaryDirectory() as folder:
        root = repository(Path(folder) / "models")
        with serving(root, "--http-max-input-size", str(MAX_INPUT_BYTES)) as gateway:
            sent, found = findings(
                gateway, arguments.requests, arguments.seed, print, sizes, arguments.match
            )
        with serving(
            unread.repository(Path(folder) / "unread"),
            *("--max-request-memory", str(unread.BUDGET_BYTES)),
        ) as gateway:
            attacks = unread.attacks(gateway, arguments.match)
            random.Random(arguments.seed).shuffle(attacks)
            attacks = attacks[: arguments.unread]
            found += unread.findings(gateway, attacks)
    print(f"{sent + len(attacks)} attacks, {len(found)} broke the rule")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
