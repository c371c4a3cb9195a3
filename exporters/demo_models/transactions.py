"""Synthetic card transactions with planted fraud; no real data is used.

A sequence is one card's history, oldest first; a token is one transaction, five fields in base
(8, 8, 2, 2, 2): amount band, merchant category, night, abroad, new device. A fraudulent sequence
holds one of four patterns somewhere in its history; every pattern has an honest look-alike, so that
no single token gives it away and order matters:

    pattern            planted                                     honest look-alike
    card testing       a burst of tiny online payments, one large  scattered tiny and large payments
    impossible travel  home and abroad in turn                     one trip abroad and back
    night shift        a run of luxury purchases at night          luxury by day, groceries by night
    account takeover   a new device, then high values on it        a new device, usual values

Some labels are flipped at random, as with chargebacks, so that a perfect AUC is impossible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

AMOUNTS, CATEGORIES = 8, 8
VOCAB_SIZE = AMOUNTS * CATEGORIES * 2 * 2 * 2
MAX_POSITIONS = 64
SHORTEST = 12  # transactions; every pattern fits

FRAUD_RATE = 0.35
LABEL_NOISE = 0.02
PATTERNS = ("card testing", "impossible travel", "night shift", "account takeover")
HONEST = -1

TINY, LARGE = 0, AMOUNTS - 1
ONLINE, GROCERIES, LUXURY = 0, 1, CATEGORIES - 1

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Transactions:
    """``count`` sequences.

    Attributes:
        tokens: ``[count, 64]``, zero past a sequence's end.
        seq_lens: ``[count]``, from 12 to 64.
        labels: ``[count]``, 1 is fraud, noise included.
        patterns: ``[count]``, the index into ``PATTERNS`` of the planted pattern, or -1.
    """

    tokens: Ints
    seq_lens: Ints
    labels: Ints
    patterns: Ints


@dataclass(slots=True)
class _Fields:
    """The fields of every transaction, ``[count, 64]`` each."""

    amount: Ints
    category: Ints
    night: Mask
    abroad: Mask
    new_device: Mask

    def tokens(self) -> Ints:
        token = self.amount * CATEGORIES + self.category
        for flag in (self.night, self.abroad, self.new_device):
            token = token * 2 + flag
        return token


def generate(count: int, seed: int) -> Transactions:
    """Generate ``count`` sequences; the same seed gives the same sequences."""
    rng = np.random.default_rng(seed)
    seq_lens = rng.integers(SHORTEST, MAX_POSITIONS, count, endpoint=True)
    fraudulent = rng.random(count) < FRAUD_RATE
    patterns = np.where(fraudulent, rng.integers(len(PATTERNS), size=count), HONEST)
    fields = _everyday(rng, seq_lens)
    _plant(rng, fields, seq_lens, patterns)
    real = np.arange(MAX_POSITIONS) < seq_lens[:, None]
    tokens = np.where(real, fields.tokens(), 0)
    flipped = rng.random(count) < LABEL_NOISE
    labels = (fraudulent ^ flipped).astype(np.int64)
    return Transactions(tokens, seq_lens, labels, patterns)


def _everyday(rng: np.random.Generator, seq_lens: Ints) -> _Fields:
    """Transactions of honest cards, with the look-alikes of every pattern."""
    shape = (len(seq_lens), MAX_POSITIONS)
    amount = rng.binomial(AMOUNTS - 1, 0.4, shape)
    amount[rng.random(shape) < 0.08] = TINY
    amount[rng.random(shape) < 0.03] = LARGE
    category = rng.integers(CATEGORIES, size=shape)
    night = rng.random(shape) < 0.15
    # Luxury is bought by day; at night it becomes groceries.
    category[night & (category == LUXURY)] = GROCERIES
    trip = rng.random(shape[0]) < 0.3
    abroad = _window(rng, seq_lens, np.where(trip, rng.integers(3, 8, shape[0]), 0))
    phone = rng.random(shape[0]) < 0.3
    new_device = _window(rng, seq_lens, np.where(phone, rng.integers(2, 6, shape[0]), 0))
    amount[new_device] = np.minimum(amount[new_device], 3)
    return _Fields(amount, category, night, abroad, new_device)


def _plant(rng: np.random.Generator, fields: _Fields, seq_lens: Ints, patterns: Ints) -> None:
    """Overwrite a window of every fraudulent sequence with its pattern."""
    length = rng.integers(5, 9, len(patterns))

    def window(pattern: int) -> tuple[Mask, Mask]:
        """The mask of the pattern, and that of its last transaction."""
        inside = _window(rng, seq_lens, np.where(patterns == pattern, length, 0))
        last = inside & ~np.roll(inside, -1, axis=1)
        return inside, last

    burst, last = window(0)
    fields.amount[burst] = TINY
    fields.category[burst] = ONLINE
    fields.amount[last] = LARGE

    travel, _ = window(1)
    parity = np.arange(MAX_POSITIONS) % 2 == 0
    fields.abroad[travel] = np.broadcast_to(parity, travel.shape)[travel]

    shift, _ = window(2)
    fields.night[shift] = True
    fields.category[shift] = LUXURY

    takeover, _ = window(3)
    fields.new_device[takeover] = True
    fields.amount[takeover] = rng.integers(AMOUNTS - 3, AMOUNTS, int(takeover.sum()))


def _window(rng: np.random.Generator, seq_lens: Ints, lengths: Ints) -> Mask:
    """A mask of ``lengths`` consecutive transactions, somewhere within each sequence."""
    start = (rng.random(len(seq_lens)) * (seq_lens - lengths + 1)).astype(np.int64)
    steps = np.arange(MAX_POSITIONS) - start[:, None]
    return (steps >= 0) & (steps < lengths[:, None])
