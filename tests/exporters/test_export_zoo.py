"""The demo's data is reproducible and holds what it says; its checkpoints can be exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn.metrics import roc_auc_score

from modelport.exporters import model_spec
from modelport.exporters.demo_models import digits, train, transactions
from modelport.exporters.sources import checkpoint


def test_the_same_seed_gives_the_same_transactions_and_another_others() -> None:
    first, again, other = (transactions.generate(200, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.tokens, again.tokens)
    assert np.array_equal(first.labels, again.labels)
    assert not np.array_equal(first.tokens, other.tokens)


def test_transactions_keep_to_the_models_signature() -> None:
    data = transactions.generate(500, 0)
    assert data.tokens.dtype == data.seq_lens.dtype == np.int64
    assert data.tokens.min() >= 0
    assert data.tokens.max() < transactions.VOCAB_SIZE
    assert data.seq_lens.min() >= transactions.SHORTEST
    assert data.seq_lens.max() <= transactions.MAX_POSITIONS
    padding = np.arange(transactions.MAX_POSITIONS) >= data.seq_lens[:, None]
    assert (data.tokens[padding] == 0).all()


def new_device(tokens: np.ndarray) -> np.ndarray:
    return (tokens % 2).astype(bool)


def amount(tokens: np.ndarray) -> np.ndarray:
    return tokens // (transactions.CATEGORIES * 8)


def longest_run(condition: np.ndarray) -> np.ndarray:
    run, best = np.zeros(len(condition), int), np.zeros(len(condition), int)
    for column in condition.T:
        run = np.where(column, run + 1, 0)
        best = np.maximum(best, run)
    return best


def signs(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """The signs of each pattern, measured without the generator's code."""
    abroad = (tokens // 2 % 2).astype(bool)
    night = (tokens // 4 % 2).astype(bool)
    category = tokens // 8 % transactions.CATEGORIES
    tiny = (amount(tokens) == transactions.TINY) & (category == transactions.ONLINE)
    return {
        "card testing": longest_run(tiny[:, 1:-1]),
        "impossible travel": (abroad[:, 1:] != abroad[:, :-1]).sum(axis=1),
        "night shift": longest_run(night & (category == transactions.LUXURY)),
        "account takeover": longest_run(new_device(tokens) & (amount(tokens) >= 5)),
    }


@pytest.mark.parametrize("pattern", transactions.PATTERNS)
def test_every_pattern_is_planted_where_it_says_and_nowhere_else(pattern: str) -> None:
    data = transactions.generate(4000, 0)
    index = transactions.PATTERNS.index(pattern)
    planted, honest = data.patterns == index, data.patterns == transactions.HONEST
    kept = planted | honest
    # Padding is token 0, a tiny online payment: put something dull in its place.
    padding = np.arange(transactions.MAX_POSITIONS) >= data.seq_lens[:, None]
    tokens = np.where(padding, 3 * transactions.CATEGORIES * 8 + 3 * 8, data.tokens)
    sign = signs(tokens)[pattern]
    assert roc_auc_score(planted[kept], sign[kept]) > 0.9


@pytest.mark.thorough
def test_labels_are_noisy_and_no_single_token_gives_fraud_away() -> None:
    data = transactions.generate(4000, 0)
    wrong = data.labels != (data.patterns != transactions.HONEST)
    assert 0.01 < wrong.mean() < 0.03
    for token in np.unique(data.tokens):
        has = (data.tokens == token).any(axis=1)
        assert roc_auc_score(data.labels, has) < 0.75


def test_digits_are_scaled_and_always_split_the_same() -> None:
    (training, held_out), (again, _) = digits.load(), digits.load()
    assert np.array_equal(training.images, again.images)
    assert training.images.shape[1:] == (1, 8, 8)
    assert training.images.dtype == np.float32
    assert (training.images.min(), training.images.max()) == (-1.0, 1.0)
    assert len(training.labels) + len(held_out.labels) == 1797
    assert set(np.unique(held_out.labels)) == set(range(10))
    seen = {image.tobytes() for image in training.images}
    assert not any(image.tobytes() in seen for image in held_out.images)


@pytest.mark.thorough
def test_training_learns_and_its_checkpoint_says_everything_an_export_needs(
    tmp_path: Path,
) -> None:
    quiet = Console(quiet=True)
    trained = train.train_vit(tmp_path / "vit.pt", epochs=6, console=quiet)
    assert trained.value > 0.6, "chance is 0.1"
    read = checkpoint.read(trained.path)
    module, _, _ = model_spec.build("vit", read.shapes, read.model_kwargs)
    checkpoint.load_into(module, read)
    content = torch.load(trained.path, weights_only=True)
    assert content["metrics"] == {"held-out accuracy": trained.value}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vit-held-out.npz", "vit.pt"]


def test_training_twice_with_one_seed_gives_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = transactions.generate(100, 9)
    monkeypatch.setattr(train, "held_out_transactions", lambda seed: few)
    quiet = Console(quiet=True)
    states = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.pt"
        train.train_fraud(path, epochs=1, sequences=512, console=quiet, seed=4)
        states.append(checkpoint.read(path).state)
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_a_checkpoint_that_cannot_be_saved_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "vit.pt"
    path.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        train.save(path, torch.nn.Linear(1, 1), model_kwargs={}, metrics={}, seed=0)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("vit.pt", b"old")]
