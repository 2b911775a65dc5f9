"""Batches of the demo targets' training."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
WIDTH, MASK = 8, 99


@pytest.fixture(scope="module")
def train_target():
    sys.path.insert(0, str(SCRIPTS))
    try:
        import train_target
    finally:
        sys.path.remove(str(SCRIPTS))
    return train_target


@pytest.fixture(scope="module")
def corpus(train_target):
    """Forty examples of four blocks, whose answers start within the first two."""
    rng = np.random.default_rng(0)
    start = np.sort(rng.integers(1, 2 * WIDTH, 40))
    ids = [rng.integers(0, MASK, 4 * WIDTH) for _ in start]
    buckets = [np.flatnonzero(start // WIDTH == block) for block in (0, 1)]
    return train_target.Corpus(ids, start, np.full(40, 4 * WIDTH), buckets)


def test_only_answers_are_masked_and_labels_are_what_was_there(train_target, corpus):
    for seed in range(5):
        batch = train_target.make_batch(corpus, np.random.default_rng(seed), 320, WIDTH, MASK)
        clean, noisy = batch.clean.numpy(), batch.noisy.numpy()
        first = clean.shape[1] - noisy.shape[1]
        masked = noisy == MASK
        np.testing.assert_array_equal(np.flatnonzero(masked), batch.rows.numpy())
        np.testing.assert_array_equal(clean[:, first:][masked], batch.target.numpy())
        np.testing.assert_array_equal(noisy[~masked], clean[:, first:][~masked])
        starts = {corpus.ids[i].tobytes(): corpus.start[i] for i in range(len(corpus.ids))}
        for row, tokens in zip(masked, clean, strict=True):
            assert not row[: starts[tokens.tobytes()] - first].any()
        assert (batch.weight.numpy() > 0).all()
