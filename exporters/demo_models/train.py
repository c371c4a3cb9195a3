"""Reproducible training of the two demo models on the CPU."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional

from modelport.exporters.demo_models import digits, transactions
from modelport.exporters.models.fraud import FraudTransformer
from modelport.exporters.models.vit import VisionTransformer
from modelport.gateway.runtime.progress import progress_bar

FRAUD_KWARGS: dict[str, Any] = {
    "vocab_size": transactions.VOCAB_SIZE,
    "d_model": 64,
    "nhead": 4,
    "num_layers": 2,
    "dim_feedforward": 128,
    "max_positions": transactions.MAX_POSITIONS,
}
VIT_KWARGS: dict[str, Any] = {
    "image_size": digits.IMAGE_SIZE,
    "patch_size": 2,
    "in_channels": 1,
    "num_classes": digits.CLASSES,
    "dim": 64,
    "depth": 4,
    "num_heads": 4,
    "mlp_dim": 128,
}

FRAUD_SEQUENCES = 12_000
FRAUD_HELD_OUT = 4_000
#: Offset of the held-out seed from the training seed, so that the two never overlap.
HELD_OUT_SEED = 1_000_003

Batch = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Trained:
    """A saved checkpoint, and its quality on held-out data."""

    path: Path
    metric: str
    value: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Recipe:
    """The parameters in which the two trainings differ."""

    factory: Callable[..., nn.Module]
    model_kwargs: dict[str, Any]
    columns: Batch
    batch_size: int
    epochs: int
    learning_rate: float
    metric: str
    loss: Callable[[Any, Batch], Tensor]
    score: Callable[[Any], float]
    held_out: Mapping[str, Any]  # arrays
    lengths: Tensor | None = None  # of the rows, if they differ and padding costs time


def held_out_transactions(count: int = FRAUD_HELD_OUT, seed: int = 0) -> transactions.Transactions:
    """Sequences that ``train_fraud`` with the same seed has not seen."""
    return transactions.generate(count, seed + HELD_OUT_SEED)


def train_fraud(
    path: Path,
    *,
    seed: int = 0,
    epochs: int = 3,
    sequences: int = FRAUD_SEQUENCES,
    console: Console | None = None,
) -> Trained:
    """Train the fraud transformer and save its checkpoint at ``path``; the metric is ROC AUC.

    The held-out data is written beside it, see ``held_out_path``.
    """
    data = transactions.generate(sequences, seed)
    held_out = held_out_transactions(seed=seed)

    def loss(module: FraudTransformer, batch: Batch) -> Tensor:
        tokens, seq_lens, labels = batch
        logits = module.logits(tokens[:, : int(seq_lens.max())], seq_lens)
        return functional.binary_cross_entropy_with_logits(logits, labels.float())

    def score(module: FraudTransformer) -> float:
        probability = module(torch.from_numpy(held_out.tokens), torch.from_numpy(held_out.seq_lens))
        return float(roc_auc_score(held_out.labels, probability.numpy()))

    recipe = _Recipe(
        factory=FraudTransformer,
        model_kwargs=FRAUD_KWARGS,
        columns=tuple(map(torch.from_numpy, (data.tokens, data.seq_lens, data.labels))),
        lengths=torch.from_numpy(data.seq_lens),
        batch_size=64,
        epochs=epochs,
        learning_rate=2e-3,
        metric="held-out AUC",
        loss=loss,
        score=score,
        held_out={
            "tokens": held_out.tokens,
            "seq_lens": held_out.seq_lens,
            "labels": held_out.labels,
        },
    )
    return _train(recipe, path, seed, console)


def train_vit(
    path: Path, *, seed: int = 0, epochs: int = 15, console: Console | None = None
) -> Trained:
    """Train the digits ViT and save its checkpoint at ``path``; the metric is accuracy."""
    training, held_out = digits.load()

    def loss(module: VisionTransformer, batch: Batch) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(module(_shift(images)), labels)

    def score(module: VisionTransformer) -> float:
        predicted = module(torch.from_numpy(held_out.images)).argmax(dim=1).numpy()
        return float(np.mean(predicted == held_out.labels))

    recipe = _Recipe(
        factory=VisionTransformer,
        model_kwargs=VIT_KWARGS,
        columns=(torch.from_numpy(training.images), torch.from_numpy(training.labels)),
        batch_size=32,
        epochs=epochs,
        learning_rate=2e-3,
        metric="held-out accuracy",
        loss=loss,
        score=score,
        held_out={"image": held_out.images, "labels": held_out.labels},
    )
    return _train(recipe, path, seed, console)


def _train(recipe: _Recipe, path: Path, seed: int, console: Console | None) -> Trained:
    started = time.perf_counter()
    console = console or Console(stderr=True)
    with torch.random.fork_rng(), _one_thread():
        torch.manual_seed(seed)
        module = recipe.factory(**recipe.model_kwargs)
        _fit(module, recipe, path.stem, console)
    with torch.no_grad():
        value = recipe.score(module.eval())
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(held_out_path(path), lambda file: np.savez(file, **recipe.held_out))
    save(
        path,
        module,
        model_kwargs=recipe.model_kwargs,
        metrics={recipe.metric: value},
        seed=seed,
    )
    trained = Trained(path, recipe.metric, value, time.perf_counter() - started)
    console.print(f"{path.stem}: {trained.metric} {value:.4f} after {trained.seconds:.0f} s")
    return trained


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: on models this small two waste most of their time waiting."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _fit(module: nn.Module, recipe: _Recipe, name: str, console: Console) -> None:
    rows = len(recipe.columns[0])
    steps = rows // recipe.batch_size
    optimizer = torch.optim.AdamW(module.parameters(), recipe.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=recipe.epochs * steps
    )
    total, done, told = recipe.epochs * steps, 0, ""
    module.train()
    with progress_bar(console.quiet) as show:
        for epoch in range(1, recipe.epochs + 1):
            stage = f"{name} epoch {epoch}/{recipe.epochs}{told}"
            for chosen in _batches(recipe):
                show(stage, done, total)
                optimizer.zero_grad()
                loss = recipe.loss(module, tuple(column[chosen] for column in recipe.columns))
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                done += 1
            told = f", loss {loss.item():.4f}"


def _batches(recipe: _Recipe) -> Tensor:
    """Row numbers ``[steps, batch_size]``, shuffled; rows of like length share a batch."""
    rows = len(recipe.columns[0])
    steps = rows // recipe.batch_size
    order = torch.randperm(rows)[: steps * recipe.batch_size]
    if recipe.lengths is not None:
        order = order[torch.argsort(recipe.lengths[order], stable=True)]
    return order.view(steps, -1)[torch.randperm(steps)]


def _shift(images: Tensor) -> Tensor:
    """Move every other image, at random, by up to one pixel each way; background fills the gap."""
    padded = functional.pad(images, (1, 1, 1, 1), value=-1.0)
    size = images.shape[-1]
    moved = torch.rand(len(images), 1) < 0.5
    offsets = torch.where(moved, torch.randint(3, (len(images), 2)), 1)
    rows = offsets[:, :1] + torch.arange(size)
    columns = offsets[:, 1:] + torch.arange(size)
    each = torch.arange(len(images))[:, None, None]
    shifted: Tensor = padded[:, 0][each, rows[:, :, None], columns[:, None, :]]
    return shifted[:, None]


def save(
    path: Path,
    module: nn.Module,
    *,
    model_kwargs: dict[str, Any],
    metrics: dict[str, float],
    seed: int,
) -> None:
    """Write a training checkpoint to ``path`` atomically."""
    content = {
        "model_state_dict": module.state_dict(),
        "model_kwargs": model_kwargs,
        "metrics": metrics,
        "seed": seed,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, lambda file: torch.save(content, file))


def held_out_path(checkpoint: Path) -> Path:
    """The path of the data that ``checkpoint`` has not seen, for ``export --data``."""
    return checkpoint.with_name(f"{checkpoint.stem}-held-out.npz")


def _write(path: Path, write: Callable[[Any], None]) -> None:
    """Write a file atomically."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        try:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
