"""Hugging Face folders of common sizes: one ``modelport export`` each, measured from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEAD = "| model | parameters | seconds | CPU seconds | peak memory | samples | max error |"
#: What an export of BERT-base may take on two cores.
MOST_SECONDS, MOST_BYTES = 60.0, 4e9


def bert() -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig())


def vit() -> Any:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig())


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


#: Models with their default configurations and random weights.
MODELS: dict[str, Callable[[], Any]] = {"BERT-base": bert, "ViT-base": vit, "GPT-2": gpt2}


@dataclass(frozen=True, slots=True)
class WholeExport:
    """The resources of a whole command, from its start to its exit, and its own report."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    report: dict[str, Any]


def write(build: Callable[[], Any], folder: Path) -> int:
    """Write a folder with random weights; return their number."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = build().eval()
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def export(folder: Path, repository: Path) -> WholeExport:
    """Export ``folder`` to ONNX and publish it.

    Raises:
        RuntimeError: the export failed; the message is its own.
    """
    command = [sys.executable, "-m", "modelport", "export", str(folder), "--format", "onnx"]
    began = time.monotonic()
    with subprocess.Popen(
        [*command, "--repository", str(repository), "--json", "--quiet"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        printed, errors = process.stdout.read(), process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{folder.name}: {errors.strip()}")
    return WholeExport(
        time.monotonic() - began,
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss * 1024,
        json.loads(printed)[0],
    )


def rows(work: Path) -> Iterator[str]:
    """Export each model, and yield the lines of the table."""
    yield HEAD
    yield "|" + "---|" * HEAD.count(" | ") + "---|"
    for name, build in MODELS.items():
        folder = work / name.lower()
        count = write(build, folder)
        found = export(folder, work / "repository")
        cells = (
            name,
            f"{count / 1e6:.0f} M",
            f"{found.seconds:.0f}",
            f"{found.cpu_seconds:.0f}",
            f"{found.peak_bytes / 1e9:.1f} GB",
            str(found.report["samples"]),
            f"{found.report['max_abs_error']:.1e}",
        )
        yield f"| {' | '.join(cells)} |"
