"""``modelport demo``: train, export, serve and call two small models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

import click
import numpy as np

import modelport
from modelport.exporters.runtime.interruption import InterruptibleCommand
from modelport.exporters.runtime.local_gateway import serving
from modelport.gateway.cli.paths import unwritable
from modelport.gateway.errors import Internal, Unavailable, UsageError
from modelport.gateway.extras import missing_extra
from modelport.gateway.types import Array

if TYPE_CHECKING:
    from rich.console import Console

CHECKPOINTS = Path("checkpoints")
REPOSITORY = Path("model_repository")
PICTURE = CHECKPOINTS / "digit.png"
MAX_BATCH_SIZE = 8
#: Number of held-out samples sent over every protocol, and of those printed.
SAMPLES, SHOWN = 256, 6
PROTOCOLS = ("HTTP JSON", "HTTP binary", "gRPC")

Infer = Callable[[str, Mapping[str, Array], str], Array]


@dataclass(frozen=True, slots=True)
class Task:
    """A demo model with its held-out samples: inputs by name, ``[N, ...]``, and the true
    answers."""

    name: str
    output: str
    inputs: Mapping[str, Array]
    truth: list[str]
    answer: Callable[[Array], str]

    @property
    def checkpoint(self) -> Path:
        return CHECKPOINTS / f"{self.name}.pt"


@click.command(cls=InterruptibleCommand)
@click.option("--retrain", is_flag=True, help="Train again even if the checkpoints exist.")
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of training."
)
def demo(retrain: bool, seed: int) -> None:
    """Train two small models, export and prove them, serve them, and call them.

    A fraud transformer on synthetic card transactions and a Vision Transformer on real handwritten
    digits. Writes checkpoints/ (with digit.png, one of the digits, to send to the model) and
    model_repository/ in the current folder; safe to repeat.
    """
    for path in (PICTURE, REPOSITORY / "fraud"):
        if reason := unwritable(path):
            raise UsageError(f"{reason}; run the demo in a folder of your own")
    try:
        tasks = [_fraud(seed), _digits()]
        from rich.console import Console
    except ImportError as error:
        raise missing_extra(error) from error
    console = Console()
    console.rule("1. Train")
    for task in tasks:
        _train(task, retrain, seed, console)
    console.rule("2. Export to ONNX, prove, publish")
    for task in tasks:
        _export(task, console)
    console.rule("3. Serve")
    with serving(REPOSITORY) as ports, ExitStack() as stack:
        console.print(
            f"The gateway is ready: HTTP 127.0.0.1:{ports['http_port']}, "
            f"gRPC 127.0.0.1:{ports['grpc_port']}"
        )
        infer = _clients(stack, ports)
        console.rule("4. Call: held-out samples over three protocols")
        for task in tasks:
            _call(task, infer, console)
    console.rule("5. Your turn")
    _write_picture(tasks[1])
    _print_commands(tasks, console)


def _fraud(seed: int) -> Task:
    from modelport.exporters.demo_models import train

    data = train.held_out_transactions(SAMPLES, seed)
    return Task(
        "fraud",
        "probability",
        {"tokens": data.tokens, "seq_lens": data.seq_lens[:, np.newaxis]},
        ["fraud" if label else "honest" for label in data.labels],
        lambda row: f"{'fraud' if row[0] >= 0.5 else 'honest'} {row[0]:.3f}",
    )


def _digits() -> Task:
    from modelport.exporters.demo_models import digits

    _, held_out = digits.load()
    return Task(
        "vit",
        "logits",
        {"image": held_out.images[:SAMPLES]},
        [str(label) for label in held_out.labels[:SAMPLES]],
        lambda row: str(int(row.argmax())),
    )


def _train(task: Task, retrain: bool, seed: int, console: Console) -> None:
    import torch

    from modelport.exporters.demo_models import train

    if task.checkpoint.exists() and not retrain:
        metrics = torch.load(task.checkpoint, weights_only=True)["metrics"]
        told = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        console.print(f"{task.checkpoint} exists ({told}); --retrain trains it again")
        return
    trainer = train.train_fraud if task.name == "fraud" else train.train_vit
    trainer(task.checkpoint, seed=seed, console=console)


def _export(task: Task, console: Console) -> None:
    from modelport.gateway.repository.manifest import sha256_of

    published = _published(task.name)
    if sha256_of(task.checkpoint) in published.values():
        console.print(f"{task.checkpoint} is published in {REPOSITORY / task.name}")
        return
    command = ["export", str(task.checkpoint), "--model", task.name, "--format", "onnx"]
    console.print(f"$ modelport {' '.join(command)}", style="bold")
    from modelport.exporters.cli.export import export

    export.main(command[1:], standalone_mode=False)


def _published(name: str) -> dict[str, str]:
    """Map each version to the SHA-256 of the checkpoint it was exported from."""
    found = {}
    for path in (REPOSITORY / name).glob("[0-9]*/certificate.json"):
        found[path.parent.name] = str(json.loads(path.read_text())["checkpoint"]["sha256"])
    return found


def _clients(stack: ExitStack, ports: Mapping[str, int]) -> Infer:
    """Return a function that sends inputs to a model over a named protocol."""
    url = f"http://127.0.0.1:{ports['http_port']}"
    http = stack.enter_context(modelport.Client(url))
    grpc = stack.enter_context(modelport.Client(f"grpc://127.0.0.1:{ports['grpc_port']}"))
    for status in http.models():
        if status.name in ("fraud", "vit") and status.state == "UNAVAILABLE":
            raise Unavailable(f"'{status.name}' is not served: {status.reason}")
    datatypes = {"int64": "INT64", "float32": "FP32"}

    def infer(model: str, inputs: Mapping[str, Array], protocol: str) -> Array:
        output = "probability" if model == "fraud" else "logits"
        if protocol != "HTTP JSON":
            client = grpc if protocol == "gRPC" else http
            return client.infer(model, inputs, outputs=[output])[output]
        tensors = [
            {
                "name": name,
                "shape": data.shape,
                "datatype": datatypes[data.dtype.name],
                "data": data.ravel().tolist(),
            }
            for name, data in inputs.items()
        ]
        document = {"inputs": tensors, "outputs": [{"name": output}]}
        with urlopen(f"{url}/v2/models/{model}/infer", json.dumps(document).encode()) as response:
            answer = json.load(response)["outputs"][0]
        return np.array(answer["data"], np.float32).reshape(answer["shape"])

    return infer


def _call(task: Task, infer: Infer, console: Console) -> None:
    from rich.table import Table

    count = len(task.truth)
    answers = {
        protocol: np.concatenate(
            [
                infer(
                    task.name,
                    {k: v[i : i + MAX_BATCH_SIZE] for k, v in task.inputs.items()},
                    protocol,
                )
                for i in range(0, count, MAX_BATCH_SIZE)
            ]
        )
        for protocol in PROTOCOLS
    }
    table = Table("sample", "truth", *PROTOCOLS, title=task.name)
    for row in _shown(task):
        told = [task.answer(answers[protocol][row]) for protocol in PROTOCOLS]
        table.add_row(str(row), task.truth[row], *told)
    console.print(table)
    first = answers[PROTOCOLS[0]]
    same = all(np.array_equal(first, answers[protocol]) for protocol in PROTOCOLS)
    right = sum(task.answer(first[row]).split()[0] == task.truth[row] for row in range(count))
    console.print(
        f"{count} held-out samples: the three protocols are "
        f"{'bit-identical' if same else 'NOT identical'}; {right / count:.1%} right\n"
    )
    if not same:
        raise Internal(f"the protocols disagree on '{task.name}'")


def _shown(task: Task) -> list[int]:
    """The first samples of each class in turn, so that rare classes are shown too."""
    rows: dict[str, list[int]] = {}
    for row, truth in enumerate(task.truth):
        rows.setdefault(truth, []).append(row)
    turns = max(1, SHOWN // len(rows))
    return sorted(row for found in rows.values() for row in found[:turns])[:10]


def _write_picture(task: Task) -> None:
    """Write the first held-out digit as a PNG file."""
    from PIL import Image

    from modelport.exporters.demo_models import digits

    pixels = (task.inputs["image"][0, 0] * digits.STD + digits.MEAN) * 255
    Image.fromarray(pixels.round().astype(np.uint8)).save(PICTURE)


def _print_commands(tasks: list[Task], console: Console) -> None:
    """Print commands to copy, for the default ports of ``modelport serve``."""
    fraud = tasks[0].inputs
    length = int(fraud["seq_lens"][0, 0])
    tokens = fraud["tokens"][0, :length].tolist()
    body = json.dumps(
        {
            "inputs": [
                {"name": "tokens", "datatype": "INT64", "shape": [1, length], "data": tokens},
                {"name": "seq_lens", "datatype": "INT64", "shape": [1, 1], "data": [length]},
            ]
        }
    )
    text = f"""\
Keep the gateway running with  make serve  (or: modelport serve --model-repository {REPOSITORY})
and call it from another terminal:

modelport models

modelport infer vit {PICTURE} --class-count 1

curl -s http://127.0.0.1:8000/v2/models/fraud/infer -d '{body}'

python - <<'END'
import modelport
from modelport.exporters.demo_models import digits
image, label = digits.load()[1].images[:1], digits.load()[1].labels[0]
with modelport.Client("grpc://127.0.0.1:8001") as client:
    print("predicted", client.infer("vit", {{"image": image}})["logits"].argmax(), "truth", label)
END
"""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
