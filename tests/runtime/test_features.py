"""What the order model reads: no token ids, the documented columns, the same from a record as from the target."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from spot_deploy.engines.files import write_json
from spot_deploy.runtime.drafters import Round, SpotDrafter
from spot_deploy.runtime.features import BEFORE, HYPOTHETICAL, MASKED, ROOT, Stale, order_inputs
from spot_deploy.runtime.head import Head, summarise
from spot_deploy.runtime.noise import Noise
from spot_deploy.runtime.sampler import candidate_odds
from spot_deploy.runtime.state import Commit, State
from spot_deploy.training.records import FORMAT, Recorder, load_records

WIDTH, POSITIONS = 8, np.array([1, 3, 4, 6])


def head_of(logits):
    top, ids, rest, _ = summarise(logits, 1.0)
    return Head(POSITIONS, top, ids, rest, None, 1.0, lambda m: logits[m])


def logits_of(seed, vocab=60):
    return np.random.default_rng(seed).normal(size=(len(POSITIONS), vocab)).astype(np.float32) * 3


def test_renaming_the_vocabulary_changes_nothing():
    logits = logits_of(0)
    renamed = np.random.default_rng(1).permutation(60)
    prefix, same = [], []
    for position, token in ((3, 7), (6, 50)):
        prefix.append(Commit(position, token))
        same.append(Commit(position, int(np.flatnonzero(renamed == token)[0])))
    one = order_inputs(Stale.of(head_of(logits), WIDTH), [prefix])
    other = order_inputs(Stale.of(head_of(logits[:, renamed]), WIDTH), [same])
    np.testing.assert_allclose(one.features, other.features, atol=1e-6)
    np.testing.assert_array_equal(one.state_id, other.state_id)


def test_columns():
    logits = logits_of(2)
    p = np.exp(logits.astype(float))
    p /= p.sum(1, keepdims=True)
    ranked = -np.sort(-p, axis=1)
    token = int(p[1].argmax())
    inputs = order_inputs(Stale.of(head_of(logits), WIDTH), [[Commit(3, token), Commit(6, 0)], [Commit(3, token)]])
    features = inputs.features[0]
    np.testing.assert_allclose(features[POSITIONS, :32], np.log(ranked[:, :32]) / 10, atol=1e-5)
    np.testing.assert_allclose(features[POSITIONS, 32], ranked[:, 32:].sum(1), atol=1e-5)
    odds = np.log(ranked[:, 0] / (1 - ranked[:, 0]))
    np.testing.assert_allclose(features[POSITIONS, 35], odds / 10, atol=1e-5)
    # Compared with what the prefix leaves masked, in each of them anew.
    for row, left in zip(inputs.features, inputs.masked, strict=True):
        among = dict(zip(POSITIONS, odds, strict=True))
        best = sorted((p for p in POSITIONS if left[p]), key=lambda p: -among[p])
        for rank, position in enumerate(best):
            gap = among[best[0]] - among[position]
            np.testing.assert_allclose(row[position, [33, 34]], [np.exp(-gap), max(-gap, -8) / 4], atol=1e-5)
            np.testing.assert_allclose(row[position, 36], np.exp(-rank / 2), rtol=1e-6)
        assert not row[~left][:, [33, 34, 36]].any()
    assert features[3, 37] == np.float32(ranked[1, 0])
    np.testing.assert_allclose(features[:, 38], 2 / WIDTH)
    np.testing.assert_allclose(features[:, 39], 2 / 32)
    given = np.setdiff1d(np.arange(WIDTH), POSITIONS)
    assert not features[given, :38].any()
    assert inputs.state_id[0].tolist() == [BEFORE, MASKED, BEFORE, ROOT, MASKED, BEFORE, HYPOTHETICAL, BEFORE]
    assert inputs.masked.sum(1).tolist() == [2, 3]
    assert inputs.depth.tolist() == [2, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_record_gives_the_same_features_as_the_target(tmp_path, temperature):
    """Up to the half precision of the recorded log-probabilities; coupled to the noise that it was recorded with."""
    recorder = Recorder(WIDTH)
    recorder.temperature, recorder.seed = temperature, 2**63 + 17
    noise = Noise(2**63 + 17) if temperature else None
    tokens = np.zeros(WIDTH, np.int64)
    tokens[POSITIONS] = 99
    heads = []
    state = State(5, tokens, 99)
    for seed in range(3):
        head = head_of(logits_of(seed))
        keep = np.isin(POSITIONS, state.masked)
        head = Head(state.masked, head.logits[keep], head.ids[keep], head.rest_lse[keep], None, 1.0, head.row)
        heads.append((state, head))
        commit = Commit(int(state.masked[0]), int(head.ids[0, 0]))
        recorder(state, head, commit)
        state = state.after(commit)
    save_file(recorder.tensors(), tmp_path / "shard-00000.safetensors")
    write_json(tmp_path / "records.json", {"format": FORMAT, "block_width": WIDTH})
    (records,) = load_records([tmp_path])
    assert records.blocks == 1
    moved = 0
    for step, (state, head) in enumerate(heads):
        prefix = records.commits([step])
        stale = records.stale(0, step)
        for commits in range(step, step + 4):
            odds = candidate_odds(head, state, noise, commits)
            moved += int((np.abs(odds - stale.log_odds) > 0.1).sum())
            seen = order_inputs(stale, [prefix], [records.candidate_odds(0, stale, commits)])
            wanted = order_inputs(Stale.of(head, WIDTH), [prefix], [odds])
            np.testing.assert_allclose(seen.features, wanted.features, atol=4e-3)
            np.testing.assert_array_equal(seen.state_id, wanted.state_id)
    assert (moved > 3) == bool(temperature)  # at temperature 1 other tokens than the largest win here and there


def test_the_order_is_compared_by_the_candidates_where_they_are_given():
    """Of two prefixes with candidates of their own."""
    stale = Stale.of(head_of(logits_of(4)), WIDTH)
    own = [np.array([3.0, -1.0, 2.0, 5.0]), np.array([-2.0, 4.0, 1.0, 0.0])]
    inputs = order_inputs(stale, [[Commit(1, 0)], [Commit(6, 0)]], own)
    for features, odds, gone in zip(inputs.features, own, (1, 6), strict=True):
        np.testing.assert_allclose(features[POSITIONS, 35], odds / 10, rtol=1e-6)
        left = gone != POSITIONS
        np.testing.assert_allclose(features[POSITIONS[left], 33], np.exp(odds[left] - odds[left].max()), rtol=1e-6)
    np.testing.assert_array_equal(inputs.features[0, :, :33], inputs.features[1, :, :33])


class Watched:
    """An order model that keeps what it was given."""

    def __init__(self):
        self.seen = []

    def run(self, features, state_id, depth, masked):
        self.seen += list(zip(features, depth, strict=True))
        return np.where(masked, 0.0, -1e9).astype(np.float32)


@pytest.mark.parametrize("coupled", [False, True])
def test_the_drafter_shows_the_order_model_its_own_candidates(coupled):
    """What it would commit at each depth, with the noise of that commit."""
    tokens = np.zeros(WIDTH, np.int64)
    tokens[POSITIONS] = 99
    state, head = State(5, tokens, 99), head_of(logits_of(0))
    commit = Commit(1, int(head.ids[0, 0]))
    noise = Noise(23) if coupled else None
    watched = Watched()
    view = Round(state, head, commit, state.after(commit), 6, noise)
    assert SpotDrafter(watched).draft(view)
    assert {int(depth) for _, depth in watched.seen} == {1, 2}
    for features, depth in watched.seen:
        odds = candidate_odds(head, state, noise, int(depth))
        np.testing.assert_allclose(features[POSITIONS, 35], np.clip(odds, -40, 40) / 10, rtol=1e-5)


def test_a_target_that_is_entirely_sure_gives_numbers():
    """Log-odds beyond every float, at some positions or all, and a prefix that leaves nothing masked."""
    logits = np.full((len(POSITIONS), 60), -1e4, np.float32)
    logits[:, 7] = 0
    logits[0, 7:9] = 0
    stale = Stale.of(head_of(logits), WIDTH)
    prefixes = [[Commit(int(p), 7) for p in POSITIONS[:n]] for n in range(1, len(POSITIONS) + 1)]
    features = order_inputs(stale, prefixes).features
    assert np.isfinite(features).all()
    assert (features[0, POSITIONS[1:], 33] == 1).all()
