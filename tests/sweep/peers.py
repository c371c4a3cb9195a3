"""The same architectures by other exporters to ONNX, held to the same comparison.

    python -m tests.sweep.peers [--results FILE] [--page FILE] [PATTERN …]

A run goes on where an earlier one with the same results file ended.

``torch.onnx.export`` is called as its documentation does, with every axis dynamic; ``optimum-cli
export onnx`` runs in an environment of its own, as it needs an older transformers. A file that they
write counts as published. Each is then compared with the original where modelport reads the
checkpoint, whose signature says which inputs are valid.
"""

from __future__ import annotations

import argparse
import fnmatch
import inspect
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from modelport.exporters.loaded_model import Source
from modelport.exporters.sources import SourceRequest, reader_selection
from modelport.gateway.errors import first_line
from modelport.gateway.types import Array, ModelSignature
from modelport.loadtests.system import environments
from tests import verb
from tests.sweep import comparison, page
from tests.sweep.catalogue import Architecture, catalogue

#: Accelerate is for models with an encoder and a decoder.
OPTIMUM = ("torch==2.13.0", "optimum-onnx[onnxruntime]==0.1.0", "accelerate==1.12.0")
#: In the log of a transformers that does not find the weights under the names it knows.
UNREAD_WEIGHTS = "newly initialized"
SECONDS = 600.0
#: An input of decoders that the original counts itself, from the first token on.
POSITIONS = "position_ids"

#: Verdicts on a peer's export.
RIGHT, WRONG, FAILS, REFUSED = "right", "wrong", "fails at other sizes", "refused"
UNCOMPARED = "not compared"


@dataclass(frozen=True, slots=True)
class PeerOutcome:
    architecture: str
    peer: str
    verdict: str
    detail: str = ""


class ArtifactFails(Exception):
    """A peer's file does not run on valid inputs."""


class NotComparable(Exception):
    """A peer's file has inputs that nobody has declared, other weights, or a part of the model."""


def _opened(file: Path, declared: ModelSignature) -> tuple[comparison.Session, ModelSignature]:
    """Open ``file``; return its session, and the part of the signature that it has.

    Inputs that a peer leaves out are left out for the original, too.
    """
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ArtifactFails(first_line(error)) from error
    taken = {value.name for value in session.get_inputs()}
    counted = taken & {POSITIONS} - {spec.name for spec in declared.inputs}
    unknown = taken - counted - {spec.name for spec in declared.inputs}
    if unknown:
        raise NotComparable(f"it has the inputs {sorted(unknown)}, whose values nobody declares")
    names = [value.name for value in session.get_outputs()]
    common = tuple(spec for spec in declared.outputs if spec.name in names)
    if not common:
        names = [spec.name for spec in declared.outputs[: len(names)]]
    inputs = tuple(spec for spec in declared.inputs if spec.name in taken)
    outputs = common or declared.outputs[: len(names)]

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        feed = dict(inputs)
        if counted:
            batch, length = inputs["input_ids"].shape
            feed[POSITIONS] = np.tile(np.arange(length), (batch, 1))
        try:
            return dict(zip(names, session.run(None, feed), strict=False))
        except Exception as error:
            raise ArtifactFails(first_line(error)) from error

    return run, replace(declared, inputs=inputs, outputs=outputs)


def torch_onnx(architecture: Architecture, checkpoint: Path, source: Source, file: Path) -> None:
    """Export with ``torch.onnx.export``; raise what it raises."""
    import torch

    from modelport.exporters.formats import tracing

    names = [spec.name for spec in source.signature.inputs]
    examples = tracing.example_inputs(source.signature)
    auto = torch.export.Dim.AUTO
    shapes: tuple[Any, ...] = tuple(dict.fromkeys(range(t.dim()), auto) for t in examples)
    parameters = inspect.signature(source.model.forward).parameters.values()
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        shapes = (shapes,)
    torch.onnx.export(
        source.model,
        tuple(examples),
        str(file),
        input_names=names,
        output_names=[spec.name for spec in source.signature.outputs],
        dynamic_shapes=shapes,
        dynamo=True,
        verbose=False,
    )


def optimum(architecture: Architecture, checkpoint: Path, source: Source, file: Path) -> None:
    """Export with ``optimum-cli``; raise its last line if it fails."""
    python = environments.venv("optimum", *OPTIMUM) / "python"
    task = architecture.name.partition(":")[2]
    command = [str(python), "-m", "optimum.exporters.onnx", "--model", str(checkpoint)]
    done = subprocess.run(
        [*command, "--task", task, str(file.parent)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    if not done.returncode and not file.is_file():
        written = sorted(path.name for path in file.parent.glob("*.onnx"))
        raise NotComparable(f"it writes {', '.join(written)}, and modelport one file")
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise RuntimeError(last[0] if last else f"exit {done.returncode}")
    if UNREAD_WEIGHTS in done.stderr:
        raise NotComparable("its transformers does not read the weights, and draws others")


PEERS: Mapping[str, Callable[[Architecture, Path, Source, Path], None]] = {
    "torch.onnx.export": torch_onnx,
    "optimum-onnx": optimum,
}


def _outcome(architecture: Architecture, peer: str) -> PeerOutcome:
    with tempfile.TemporaryDirectory(prefix="sweep-") as work:
        checkpoint, folder = Path(work, "checkpoint"), Path(work, "artifact")
        checkpoint.mkdir()
        folder.mkdir()
        arguments = architecture.write(checkpoint)
        try:
            source = reader_selection.load(_request(arguments))
        except Exception as error:
            return PeerOutcome(architecture.name, peer, UNCOMPARED, first_line(error))
        file = folder / "model.onnx"
        try:
            PEERS[peer](architecture, checkpoint, source, file)
        except NotComparable as error:
            return PeerOutcome(architecture.name, peer, UNCOMPARED, str(error))
        except Exception as error:
            return PeerOutcome(architecture.name, peer, REFUSED, first_line(error))
        try:
            session, signature = _opened(file, source.signature)
            original = architecture.original(checkpoint)
            found = comparison.difference(session, signature, original)
        except ArtifactFails as error:
            return PeerOutcome(architecture.name, peer, FAILS, str(error))
        except Exception as error:  # the original, without the inputs that the peer leaves out
            return PeerOutcome(architecture.name, peer, UNCOMPARED, first_line(error))
        verdict = WRONG if found.wrong else RIGHT
        return PeerOutcome(architecture.name, peer, verdict, found.wrong)


def _request(arguments: list[str]) -> SourceRequest:
    """The request that ``modelport export`` makes of its arguments."""
    checkpoint, *flags = arguments
    fields: dict[str, Any] = {"checkpoint": Path(checkpoint), "max_batch_size": 8, "model": None}
    inputs = []
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        if flag == "--input":
            inputs.append(value)
        elif flag == "--max-batch-size":
            fields["max_batch_size"] = int(value)
        else:
            fields[flag.removeprefix("--").replace("-", "_")] = value
    return SourceRequest(**fields, inputs=tuple(inputs))


def _work(architecture: Architecture, peer: str, pipe: Connection) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    try:
        pipe.send(_outcome(architecture, peer))
    except Exception:
        detail = traceback.format_exc(limit=-2)
        pipe.send(PeerOutcome(architecture.name, peer, REFUSED, detail))


def _in_process(architecture: Architecture, peer: str) -> PeerOutcome:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(architecture, peer, theirs))
    process.start()
    theirs.close()
    try:
        if ours.poll(SECONDS):
            outcome: PeerOutcome = ours.recv()
            return outcome
        detail = f"no end after {SECONDS:.0f} s"
    except EOFError:
        detail = "the process died"
    finally:
        process.kill()
        process.join()
    return PeerOutcome(architecture.name, peer, REFUSED, detail)


def read(file: Path) -> dict[tuple[str, str], PeerOutcome]:
    """The outcomes in ``file``, a JSON object on each line."""
    lines = file.read_text().splitlines() if file.is_file() else ()
    found = (PeerOutcome(**json.loads(line)) for line in lines)
    return {(outcome.architecture, outcome.peer): outcome for outcome in found}


def table(outcomes: Iterable[PeerOutcome], published: Collection[str]) -> str:
    """Counts by peer, and the files that are not right.

    Args:
        published: The architectures that modelport publishes to ONNX.
    """
    rows = list(outcomes)
    words = (RIGHT, WRONG, FAILS, REFUSED, UNCOMPARED)
    lines = [f"| exporter | models | {' | '.join(words)} | modelport, the same models: {RIGHT} |"]
    lines.append("|---" + "|--:" * (len(words) + 2) + "|")
    for peer in PEERS:
        asked = [row for row in rows if row.peer == peer]
        counts = Counter(row.verdict for row in asked)
        ours = sum(row.architecture in published for row in asked)
        cells = [peer, len(asked), *(counts[word] for word in words), ours]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines.append("")
    lines += (
        f"- `{row.architecture}` by {row.peer}: {row.verdict}: {page.cell(row.detail)}"
        for row in rows
        if row.verdict in (WRONG, FAILS)
    )
    return "\n".join(lines).rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep.peers", description=__doc__)
    parser.add_argument("patterns", nargs="*", default=["*"], metavar="PATTERN")
    parser.add_argument("--peer", dest="peers", action="append", choices=list(PEERS))
    parser.add_argument("--results", type=Path, default=Path("build/sweep-peers.jsonl"))
    parser.add_argument("--page", type=Path, help="write the table into this page of the sweep")
    options = parser.parse_args()
    from tests.sweep.__main__ import import_libraries

    import_libraries()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    done = read(options.results)
    for name, architecture in catalogue().items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in options.patterns):
            continue
        for peer in options.peers or PEERS:
            if (name, peer) in done or (peer == "optimum-onnx" and ":" not in name):
                continue
            outcome = _in_process(architecture, peer)
            with options.results.open("a") as lines:
                lines.write(json.dumps(asdict(outcome)) + "\n")
            print(f"{outcome.verdict:<22}{name:<44}{peer:<20}{outcome.detail[:200]}", flush=True)
    if options.page is not None:
        before = options.page.read_text()
        counts = table(read(options.results).values(), page.published(before))
        options.page.write_text(page.with_peers(before, counts))
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    verb.run(main)
