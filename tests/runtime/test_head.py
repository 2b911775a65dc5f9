"""The head: log-odds without saturation, ties at the boundary, the tail's own confidence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spot_deploy.runtime.head import Head, log_sum_exp, summarise


def head_of(logits, temperature=1.0, width=33, raw=False, positions=None):
    logits = np.asarray(logits, np.float32)
    inverse = 1 / temperature
    top, ids, rest, rest_raw = summarise(logits, inverse, width)
    positions = np.arange(len(logits)) if positions is None else positions
    return Head(positions, top, ids, rest, rest_raw if raw else None, inverse, lambda m: logits[m])


def exact_log_odds(row, token, scale):
    row = np.asarray(row, np.float64) * scale
    return row[token] - log_sum_exp(np.delete(row, token)[None])[0]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(4, 60),
    width=st.integers(2, 8),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    levels=st.sampled_from([3, 1000]),
    raw=st.booleans(),
)
def test_log_odds_and_head_proper(seed, vocab, width, temperature, levels, raw):
    rng = np.random.default_rng(seed)
    # Few levels make many equal logits, at the boundary too.
    logits = (rng.integers(0, levels, (5, vocab)) * (20 / levels)).astype(np.float32)
    width = min(width, vocab)
    head = head_of(logits, temperature, width, raw)
    bound = np.sort(logits, 1)[:, -width]
    for m in range(5):
        inside = set(head.ids[m][head.in_head[m]])
        assert inside == set(np.flatnonzero(logits[m] > bound[m]))
    total = log_sum_exp(logits.astype(np.float64) / temperature)
    np.testing.assert_allclose(head.total, total, atol=2e-5)
    odds = head.log_odds(np.zeros(5, np.int64))
    limit = head.tail_bound()
    for m in range(5):
        scale = 1.0 if raw else 1 / temperature
        if head.in_head[m, 0]:
            assert odds[m] == pytest.approx(exact_log_odds(logits[m], head.ids[m, 0], scale), abs=2e-5)
        outside = np.flatnonzero(logits[m] <= bound[m])
        token = head.tail_token(m, None)
        confidence = head.token_log_odds(m, token)
        best = outside[np.argmax(logits[m][outside])]
        assert token == best
        assert confidence == pytest.approx(exact_log_odds(logits[m], best, scale), abs=1e-9)
        assert limit[m] >= confidence - 1e-6


def test_log_odds_do_not_saturate():
    """float32 softmax is exactly 1.0 for both rows; total minus one would be nothing but rounding."""
    logits = np.zeros((2, 1000), np.float32)
    logits[:, 7] = (60.0, 61.0)
    odds = head_of(logits).log_odds(np.zeros(2, np.int64))
    np.testing.assert_allclose(odds, [60 - np.log(999), 61 - np.log(999)], atol=1e-4)


def test_banned_ids_never_count():
    logits = np.array([[-np.inf, 1.0, 2.0, -np.inf, 0.5]], np.float32)
    head = head_of(logits)
    assert set(head.ids[0][head.in_head[0]]) == {1, 2, 4}
    assert np.isneginf(head.rest[0])


def test_all_logits_equal_leaves_an_empty_head():
    head = head_of(np.full((1, 50), 3.0))
    assert not head.in_head.any()
    assert head.tail_token(0, None) == 0
    assert head.token_log_odds(0, 0) == pytest.approx(-np.log(49))
