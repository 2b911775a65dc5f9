"""Noise: Random123's vectors, addressing, and the law of the values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot_deploy.runtime.noise import TAIL, Noise, philox4x32

# Random123, tests/kat_vectors, "philox4x32 10": counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_known_answers(counter, key, result):
    words = philox4x32(tuple(int(w, 16) for w in counter.split()), tuple(int(w, 16) for w in key.split()))
    assert [f"{int(w):08x}" for w in words] == result.split()


@given(
    seed=st.integers(0, 2**64 - 1),
    sample=st.integers(0, 2**32 - 1),
    block=st.integers(0, 2**20),
    commits=st.integers(0, 63),
    tokens=st.lists(st.integers(0, 200_000) | st.just(TAIL), min_size=1, max_size=20),
    data=st.data(),
)
def test_a_value_does_not_depend_on_the_subset_asked_for(seed, sample, block, commits, tokens, data):
    noise = Noise(seed, sample)
    positions = np.arange(8)[:, None]
    whole = noise.gumbel(block, commits, positions, np.array(tokens)[None])
    assert whole.dtype == np.float32
    assert np.isfinite(whole).all()
    i = data.draw(st.integers(0, 7))
    j = data.draw(st.integers(0, len(tokens) - 1))
    alone = noise.gumbel(block, commits, np.int64(i), np.array([tokens[j]]))
    assert alone[0] == whole[i, j]


def test_every_part_of_the_address_counts():
    def values(seed=1, sample=0, block=2, commits=3, position=4, token=10, level=0):
        return float(Noise(seed, sample).gumbel(block, commits, np.int64(position), np.array([token]), level=level)[0])

    base = values()
    others = [
        values(seed=2),
        values(seed=1 + 2**40),
        values(sample=1),
        values(block=3),
        values(commits=4),
        values(position=5),
        values(token=11),
        values(token=12),
        values(token=TAIL),
        values(level=1),
        values(token=11, level=1),
    ]
    assert len({base, *others}) == len(others) + 1


@pytest.mark.parametrize("level", [0, 1])
def test_values_are_gumbel(level):
    values = Noise(5).gumbel(0, 0, np.arange(64)[:, None], np.arange(4000)[None], level=level).astype(np.float64)
    # Mean: Euler's constant; variance: pi^2 / 6. Standard errors are .0025 and .009.
    assert abs(values.mean() - 0.5772) < 0.012
    assert abs(values.var() - np.pi**2 / 6) < 0.045
    neighbours = np.corrcoef(values[:, ::2].ravel(), values[:, 1::2].ravel())[0, 1]
    assert abs(neighbours) < 0.015
