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


@pytest.mark.parametrize("left_to_right", [0.0, 0.5, 1.0])
def test_only_answers_are_masked_and_labels_are_what_was_there(train_target, corpus, left_to_right):
    for seed in range(5):
        batch = train_target.make_batch(corpus, np.random.default_rng(seed), 320, WIDTH, MASK, left_to_right)
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


def test_blocks_masked_from_a_position_on_weigh_the_next_tokens_most(train_target, corpus):
    batch = train_target.make_batch(corpus, np.random.default_rng(1), 320, WIDTH, MASK, 1.0)
    masked = batch.noisy.numpy() == MASK
    weight = np.zeros(masked.shape)
    weight[masked] = batch.weight.numpy()
    blocks = masked.reshape(-1, WIDTH)
    assert len({tuple(block) for block in blocks}) > WIDTH // 2
    for block, weights in zip(blocks, weight.reshape(-1, WIDTH), strict=True):
        assert (np.diff(block.astype(int)) >= 0).all()  # once masked, masked to the end
        found = weights[block]
        assert (np.diff(found) < 0).all()
    whole = weight[:, WIDTH:].reshape(len(weight), -1, WIDTH)  # the answer fills these
    np.testing.assert_allclose(whole.sum(-1), WIDTH, rtol=1e-5)
