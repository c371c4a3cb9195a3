"""Handwritten digits: the 1,797 real 8x8 images that scikit-learn bundles.

Source: the test set of E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI
Machine Learning Repository, 1998.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

IMAGE_SIZE = 8
CLASSES = 10
FULL_SCALE = 16  # pixels are counts from 0 to 16
MEAN, STD = 0.5, 0.5

HELD_OUT = 0.2
SPLIT_SEED = 0  # fixed, so that the held-out images are never trained on


@dataclass(frozen=True, slots=True)
class Digits:
    """Images float32 ``[N, 1, 8, 8]`` in [-1, 1] and their labels int64 ``[N]``."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


def normalize(pixels: NDArray[Any]) -> NDArray[np.float32]:
    """Scale pixels from [0, 16] to fractions of full scale, then apply (x - mean) / std."""
    return ((pixels / FULL_SCALE - MEAN) / STD).astype(np.float32)


def load() -> tuple[Digits, Digits]:
    """Load the training and the held-out images; the split is always the same."""
    bunch = load_digits()
    images = normalize(bunch.images)[:, None]
    labels = bunch.target.astype(np.int64)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    held_out, training = np.split(order, [int(len(order) * HELD_OUT)])
    return Digits(images[training], labels[training]), Digits(images[held_out], labels[held_out])
