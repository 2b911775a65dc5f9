"""`next_state`: against a brute-force sampler, and its law against the closed-form commit law (ladder, rung 4)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from toy_target import ToyTarget, toy_runtime

from spot_deploy.runtime.head import Head, log_sum_exp, summarise
from spot_deploy.runtime.noise import TAIL, Noise
from spot_deploy.runtime.sampler import next_state
from spot_deploy.runtime.state import State

TEMPERATURES = [0.5, 1.3, 2.5]


def head_for(logits, temperature, width, raw, fetched=None):
    inverse = 1 / temperature if temperature else 1.0
    top, ids, rest, rest_raw = summarise(logits, inverse, width)

    def row(m):
        if fetched is not None:
            fetched.append(m)
        return logits[m]

    return Head(np.arange(len(logits)), top, ids, rest, rest_raw if raw else None, inverse, row)


def brute_force(logits, temperature, width, noise, state, raw):
    """Every position's draw and confidence from the full row, with the same noise."""
    best = []
    for m, row in enumerate(logits.astype(np.float64)):
        scaled = row / temperature if temperature else row
        bound = np.sort(row)[-width]
        inside = np.flatnonzero(row > bound)
        outside = np.flatnonzero((row <= bound) & (row > -np.inf))
        if temperature:
            g = noise.gumbel(state.block, state.commits, np.int64(m), inside).astype(np.float64)
            scores = scaled[inside] + g
            g_tail = float(noise.gumbel(state.block, state.commits, np.int64(m), np.array([TAIL]))[0])
            tail = log_sum_exp(scaled[outside][None])[0] + g_tail if len(outside) else -np.inf
            if len(inside) and scores.max() >= tail:
                token = inside[scores.argmax()]
            else:
                second = noise.gumbel(state.block, state.commits, np.int64(m), outside, level=1)
                token = outside[(scaled[outside] + second).argmax()]
        else:
            token = int(row.argmax())
        confidence = row if raw else scaled
        best.append((confidence[token] - log_sum_exp(np.delete(confidence, token)[None])[0], -m, int(token)))
    _odds, negative, token = max(best)
    return -negative, token


@pytest.mark.parametrize("raw", [False, True], ids=["tempered", "raw"])
@pytest.mark.parametrize("temperature", [0.0, *TEMPERATURES])
@pytest.mark.parametrize("levels", [6, 1000], ids=["ties", "distinct"])
def test_equals_brute_force(temperature, raw, levels):
    rng = np.random.default_rng(0)
    tails = 0
    for trial in range(300):
        logits = (rng.integers(0, levels, (4, 12)) * (6 / levels)).astype(np.float32)
        logits[:, 3] = -np.inf
        state = State(block=trial, tokens=np.full(4, 3), mask_id=3, commits=0)
        noise = Noise(trial) if temperature else None
        fetched = []
        head = head_for(logits, temperature, 4, raw, fetched)
        successor, commit = next_state(state, head, noise)
        tails += bool(fetched)
        assert (commit.position, commit.token) == brute_force(logits, temperature, 4, noise, state, raw)
        assert successor.tokens[commit.position] == commit.token
        assert len(successor.masked) == 3
        assert successor.commits == 1
    if temperature > 1:
        assert tails > 5


def test_rows_are_fetched_only_where_the_tail_can_decide():
    """One sure position decides; tails elsewhere win their draw often, but cannot be the most confident."""
    logits = np.tile(np.linspace(0, 0.1, 200, dtype=np.float32), (8, 1))
    logits[0, 5] = 30.0
    fetched = []
    for seed in range(50):
        state = State(0, np.full(8, 199), 199)
        next_state(state, head_for(logits, 1.0, 33, False, fetched), Noise(seed))
    assert fetched == []


def commit_law(logits, temperature, raw):
    """P(position, token commits next) in closed form; ties in confidence go to the lower position."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - log_sum_exp(scaled)[:, None])
    confidence = np.exp(logits - log_sum_exp(logits.astype(np.float64))[:, None]) if raw else p
    law = np.zeros_like(p)
    for i, v in itertools.product(*map(range, p.shape)):
        if p[i, v] == 0:
            continue
        others = 1.0
        for j in range(len(p)):
            if j != i:
                c = confidence[i, v]
                wins = confidence[j] < c * (1 - 1e-12) if j < i else confidence[j] <= c * (1 + 1e-12)
                others *= p[j][wins].sum()
        law[i, v] = p[i, v] * others
    np.testing.assert_allclose(law.sum(), 1, atol=1e-9)
    return law


def total_variation(counts, law):
    return 0.5 * np.abs(counts / counts.sum() - law).sum()


def floor_of(law, draws):
    """Mean total variation of an honest sample: E|X - p| of a normal is sqrt(2 p (1 - p) / (pi n))."""
    return 0.5 * np.sqrt(2 * law * (1 - law) / (np.pi * draws)).sum()


@pytest.mark.parametrize("raw", [False, True], ids=["tempered", "raw"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_law_of_one_commit(temperature, raw):
    """Head of 2, 7 usable ids of 8, ties and a ban: head, tail, second level and tie rules are all drawn."""
    rng = np.random.default_rng(1)
    logits = (rng.normal(size=(3, 8)) * 1.5).astype(np.float32)
    logits[1] = logits[0][::-1]  # equal confidences at two positions
    logits[2, :4] = logits[2, 4]  # equal logits, at the boundary of the head too
    logits[:, 7] = -np.inf
    law = commit_law(logits, temperature, raw)
    draws, counts, fetched = 12_000, np.zeros_like(law), []
    head = head_for(logits, temperature, 3, raw, fetched)
    for seed in range(draws):
        _, commit = next_state(State(0, np.full(3, 7), 7), head, Noise(seed))
        counts[commit.position, commit.token] += 1
    assert len(fetched) > 200  # the tail decides often enough to be seen in the law
    assert total_variation(counts, law) < 1.6 * floor_of(law, draws)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_law_of_whole_blocks_under_speculation(temperature):
    """The law of the finished block, enumerated exactly, against SPOT decoding: noise must be fresh for every step."""
    target = ToyTarget(width=3, vocab=6, mask_id=5, head_width=3, scale=1.0, seed=4)
    runtime = toy_runtime(target)
    prompt = [1, 2, 3]
    law = {}

    def walk(tokens, probability):
        masked = np.flatnonzero(tokens == 5)
        if not len(masked):
            law[tuple(tokens)] = law.get(tuple(tokens), 0) + probability
            return
        commits = commit_law(target.logits(prompt, tokens)[masked], temperature, False)
        for i, v in zip(*np.nonzero(commits), strict=False):
            after = tokens.copy()
            after[masked[i]] = v
            walk(after, probability * commits[i, v])

    walk(np.full(3, 5), 1.0)
    keys = sorted(law)
    index = {key: i for i, key in enumerate(keys)}
    probabilities = np.array([law[key] for key in keys])
    draws, counts, accepted = 3000, np.zeros(len(keys)), 0
    for sample in range(draws):
        result = runtime.generate(
            prompt, max_new_tokens=3, temperature=temperature, seed=7, sample=sample, budget=4, ignore_eos=True
        )
        counts[index[tuple(result.token_ids)]] += 1
        accepted += result.accepted
    assert accepted > 100
    assert total_variation(counts, probabilities) < 1.3 * floor_of(probabilities, draws)
