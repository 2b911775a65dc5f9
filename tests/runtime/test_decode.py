"""The ladder of exactness, rungs 1 to 3, and what the decode loop counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from reference_target import ReferenceTarget
from toy_target import ToyTarget, toy_runtime

from spot_deploy import CommitEvent, DecodeOptions, Runtime, SpotDeployError, build_engine
from spot_deploy.runtime.audit import audit
from spot_deploy.runtime.decode import why_ended
from spot_deploy.runtime.drafters import OracleDrafter
from spot_deploy.runtime.state import Commit, State
from spot_deploy.runtime.tree import Node
from spot_deploy.training.replay import Trajectory

TEMPERATURES = [0.0, 0.5, 1.0, 1.5, 2.5]
DEMO = Path(__file__).parents[2] / "demo" / "target"


class Babble:
    """A drafter of arbitrary trees, equal states and wrong tokens among them: exactness must not depend on it."""

    def __init__(self, vocab, seed):
        self.rng, self.vocab = np.random.default_rng(seed), vocab

    def draft(self, view):
        nodes = []
        for _ in range(view.budget):
            parent = int(self.rng.integers(-1, len(nodes)))
            path = nodes[parent].path if parent >= 0 else ()
            free = [p for p in view.root.masked if p not in {c.position for c in path}]
            if len(free) > 1:
                commit = Commit(int(self.rng.choice(free)), int(self.rng.integers(self.vocab)))
                nodes.append(Node(parent, (*path, commit), 0.5))
        return nodes


def trajectory_of(runtime, prompt, options):
    trajectory = Trajectory()
    return runtime.generate(prompt, options, budget=0, observe=trajectory), trajectory


def assert_identities(result, control, decoding):
    assert result.token_ids == control.token_ids
    assert result.text == control.text
    assert result.nfe + result.accepted == result.commits == control.commits == control.nfe
    assert sum(result.accepted_per_round) == result.accepted
    assert sum(result.rejections.values()) == len(result.accepted_per_round)
    assert control.accepted == control.drafted == 0


A, B, C = (Commit(position, 50 + position) for position in range(3))
# {A, B} is drafted once, by way of A.
MERGED = [Node(-1, (A,), 0.5), Node(-1, (B,), 0.4), Node(0, (A, B), 0.6)]


@pytest.mark.parametrize(
    ("last", "commit", "reason"),
    [
        (0, Commit(0, 9), "token"),
        (0, C, "position"),
        (1, Commit(1, 9), "token"),
        (2, Commit(0, 9), "token"),  # what was drafted by way of A was drafted for B as well
        (2, C, "position"),
        (3, C, "budget"),
    ],
)
def test_a_round_ends_for_what_was_drafted_after_the_last_state_by_whatever_way(last, commit, reason):
    root = State.opened(0, np.array([], np.int64), 8, 99)
    state = root.after(*MERGED[last - 1].path) if last else root
    assert why_ended(MERGED, last, commit, state.after(commit)) == reason


# Rung 1: a NumPy target, every state alone.


@pytest.mark.parametrize("raw", [False, True], ids=["tempered", "raw"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_toy_grid_equals_draft_free(temperature, raw):
    """Every drafter, budget, floor, verifier and option, many seeds, strictly."""
    target = ToyTarget(width=5, vocab=9, mask_id=8, head_width=4, raw=raw)
    runtime = toy_runtime(target)
    accepted = {"spot": 0, "oracle": 0, "babble": 0}
    variants = [
        {"budget": 1},
        {"budget": 4},
        {"budget": 20},
        {"budget": 8, "gamma": 0.05},
        {"budget": 8, "gamma": 0.3, "tau": 2.0},
        {"budget": 6, "verifier": "uncoupled"},
        {"budget": 6, "hedge_gate": 0.0},
        {"budget": 6, "hedge_gate": 1.0, "hedge_weights": "raw"},
        {"budget": 6, "hedge_gate": 1.0, "hedge_weights": "none"},
        {"budget": 6, "draft_tail": True},
        {"budget": 6, "padded": True},
        {"budget": 6, "sequential": True},
    ]
    for seed in range(6):
        options = DecodeOptions(temperature=temperature, seed=seed, max_new_tokens=17, ignore_eos=True)
        prompt = list(np.random.default_rng(seed).integers(0, 8, 3 + seed))
        control, trajectory = trajectory_of(runtime, prompt, options)
        for variant in variants:
            result = runtime.generate(prompt, options, **variant)
            assert_identities(result, control, target.decoding)
            accepted["spot"] += result.accepted
        for top in (None, 1, 2, 8):
            result = runtime.generate(prompt, options, budget=4, drafter=OracleDrafter(trajectory.lookup, top))
            assert_identities(result, control, target.decoding)
            accepted["oracle"] += result.accepted
        result = runtime.generate(prompt, options, budget=20, drafter=Babble(8, seed))
        assert_identities(result, control, target.decoding)
        accepted["babble"] += result.accepted
    assert accepted["oracle"] >= 100
    assert accepted["spot"] >= 100
    assert accepted["babble"] >= (3 if temperature < 1 else 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.5])
def test_no_fuse_equals_its_own_control(temperature, tiny_runtime):
    for runtime, prompt in ((toy_runtime(ToyTarget(width=4)), [1, 2]), (tiny_runtime, [1, 2, 3])):
        options = DecodeOptions(temperature=temperature, max_new_tokens=30, ignore_eos=True, fuse=False)
        control = runtime.generate(prompt, options, budget=0)
        result = runtime.generate(prompt, options, budget=3)
        assert_identities(result, control, runtime.decoding)
        blocks = runtime.decoding.blocks(len(prompt), 30)
        assert result.store_forwards == control.store_forwards == len(blocks) - 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_demo_reference_equals_draft_free(temperature, demo_runtime):
    """The demo target in NumPy, float64, each state alone."""
    reference = ReferenceTarget(DEMO, demo_runtime.text.known_ids())
    runtime = Runtime(
        decoding=demo_runtime.decoding,
        defaults=demo_runtime._defaults,
        text=demo_runtime.text,
        target=reference,
        order_model=demo_runtime.order_model,
        backend="reference",
        exact_budget=256,
    )
    options = DecodeOptions(temperature=temperature, seed=3, max_new_tokens=90, ignore_eos=True)
    prompt = [{"role": "user", "content": "Reverse this list of words: one, two, three, four"}]
    control, trajectory = trajectory_of(runtime, prompt, options)
    spot = runtime.generate(prompt, options, budget=6)
    oracle = runtime.generate(prompt, options, budget=6, drafter=OracleDrafter(trajectory.lookup, 32))
    assert_identities(spot, control, runtime.decoding)
    assert_identities(oracle, control, runtime.decoding)
    assert spot.accepted + oracle.accepted >= 100


# Rungs 2 and 3: every backend, states one at a time, and batched after the invariance probe.


def assert_lossless(runtime, prompt, options, control, **variant):
    """Strict equality where the probe passed; else the audit at the draft-free shape, near ties only."""
    events = list(runtime.stream(prompt, options, **variant))
    result = events[-1].result
    if result.exact:
        assert_identities(result, control, runtime.decoding)
    commits = [(event.position, event.token) for event in events if isinstance(event, CommitEvent)]
    report = audit(runtime._target, runtime.decoding, runtime.prompt_ids(prompt), options, commits, PROBED_ERROR)
    assert report.commits == result.commits
    assert report.violations == 0
    if result.exact:
        assert report.near_ties == 0
    return result


PROBED_ERROR = 1e-4  # of a logit; the probe of the packed layout finds about 1e-5


@pytest.mark.parametrize("sequential", [True, False], ids=["one-at-a-time", "batched"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_backends_equal_draft_free(temperature, sequential, each_runtime):
    accepted = 0
    # None, shorter than a block, inside one, whole blocks, and up to the capacity of 256.
    for seed, length in enumerate((0, 1, 5, 8, 11, 220)):
        rng = np.random.default_rng(seed)
        prompt = rng.integers(0, 296, length).tolist()
        options = DecodeOptions(
            temperature=temperature, seed=seed, max_new_tokens=36, ignore_eos=True, sequential=sequential
        )
        control, trajectory = trajectory_of(each_runtime, prompt, options)
        for variant in ({"budget": 3}, {"budget": 8, "gamma": 0.02}, {"budget": 5, "verifier": "uncoupled"}):
            assert_lossless(each_runtime, prompt, options, control, **variant)
        # Drafts are right more seldom at high temperature; more tries make up for it.
        for top in (32, 31, 30, 29) if temperature > 1 else (32,):
            oracle = OracleDrafter(trajectory.lookup, top)
            accepted += assert_lossless(each_runtime, prompt, options, control, budget=4, drafter=oracle).accepted
    assert accepted >= 100


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.5])
def test_demo_on_onnxruntime_equals_draft_free(temperature, demo_runtime):
    accepted = 0
    for seed, words in enumerate(
        ("A cup holds 3 spoons of tea. How many do 4 cups hold?", "Go on with this story: Ben")
    ):
        prompt = [{"role": "user", "content": words}]
        options = DecodeOptions(temperature=temperature, seed=seed, max_new_tokens=100, ignore_eos=True)
        control, trajectory = trajectory_of(demo_runtime, prompt, options)
        for variant in (
            {"budget": 3},
            {"budget": 8},
            {"budget": 20, "gamma": 0.05},
            {"budget": 8, "padded": True},
            {"budget": 8, "draft_tail": True},
            {"budget": 8, "hedge_gate": 1.0, "hedge_weights": "raw", "tau": 1.5},
        ):
            accepted += assert_lossless(demo_runtime, prompt, options, control, **variant).accepted
        oracle = OracleDrafter(trajectory.lookup, 32)
        assert_lossless(demo_runtime, prompt, options, control, budget=8, drafter=oracle)
    assert accepted >= 100


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_packed_layout_passes_the_audit(temperature, tiny_copy):
    """Its rows depend on their slot in the last bits on some machines: near ties may differ, nothing else."""
    record, _ = build_engine(tiny_copy, backend="onnxruntime", layout="packed", threads=1)
    with Runtime.load(tiny_copy) as runtime:
        for seed in range(3):
            options = DecodeOptions(temperature=temperature, seed=seed, max_new_tokens=40, ignore_eos=True)
            control, trajectory = trajectory_of(runtime, [5, 6, 7], options)
            result = assert_lossless(runtime, [5, 6, 7], options, control, budget=8)
            assert result.exact == record.exact
            assert_lossless(runtime, [5, 6, 7], options, control, drafter=OracleDrafter(trajectory.lookup, 32))


def test_audit_finds_a_wrong_token_and_a_wrong_order(tiny_runtime):
    options = DecodeOptions(max_new_tokens=21, ignore_eos=True, budget=0)
    events = [e for e in tiny_runtime.stream([5, 6, 7], options) if isinstance(e, CommitEvent)]

    def violations(changed):
        ids = tiny_runtime.prompt_ids([5, 6, 7])
        commits = [(event.position, event.token) for event in changed]
        return audit(tiny_runtime._target, tiny_runtime.decoding, ids, options, commits, 1e-5).violations

    assert violations(events) == 0
    wrong = replace(events[3], token=(events[3].token + 1) % 256)
    assert violations([*events[:3], wrong, *events[4:]]) >= 1
    assert violations([events[1], events[0], *events[2:]]) >= 1


def test_exact_and_greedy_at_temperature_zero_agree():
    runtime = toy_runtime(ToyTarget())
    results = [runtime.generate([1, 2, 3], verifier=v, max_new_tokens=9) for v in ("coupled", "uncoupled", "greedy")]
    assert len({tuple(r.token_ids) for r in results}) == 1
    assert len({r.nfe for r in results}) == 1
    assert all(r.exact for r in results)


def test_greedy_says_that_it_is_not_exact_above_zero():
    runtime = toy_runtime(ToyTarget())
    texts = set()
    for seed in range(20):
        options = DecodeOptions(temperature=1.5, seed=seed, max_new_tokens=12, ignore_eos=True)
        greedy = runtime.generate([1], options, verifier="greedy")
        assert not greedy.exact
        assert greedy.nfe + greedy.accepted == greedy.commits
        texts.add(greedy.token_ids == runtime.generate([1], options, budget=0).token_ids)
    assert False in texts


def test_coupling_saves_passes_at_high_temperature():
    runtime = toy_runtime(ToyTarget(width=8, vocab=9, mask_id=8, head_width=9, coupling=0.15))
    passes = dict.fromkeys(("coupled", "uncoupled"), 0)
    for seed in range(25):
        for verifier in passes:
            result = runtime.generate(
                [1], temperature=2.0, seed=seed, verifier=verifier, budget=8, max_new_tokens=15, ignore_eos=True
            )
            passes[verifier] += result.nfe
    assert passes["coupled"] < passes["uncoupled"]


# Counting, stopping, capacity.


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 11, 12])
@pytest.mark.parametrize("new", [1, 4, 7, 13])
def test_draft_free_passes_are_positions_up_to_the_block_edge(prompt, new):
    target = ToyTarget(width=4)
    result = toy_runtime(target).generate([1] * prompt, budget=0, max_new_tokens=new, ignore_eos=True)
    assert result.nfe == -(-(prompt + new) // 4) * 4 - prompt
    assert len(result.token_ids) == new
    assert result.store_forwards == 0
    assert result.prefill_forwards == -(-(prompt // 4) // 2)  # two blocks a prefill pass


@pytest.mark.parametrize("budget", [1, 3, 8])
def test_joint_oracle_reaches_the_ideal(budget):
    """NFE of a block with m masks and a perfect chain: 1 + ceil((m - 1) / (D + 1))."""
    target = ToyTarget(width=8, vocab=9, mask_id=8, coupling=0.01, head_width=9)
    runtime = toy_runtime(target)
    options = DecodeOptions(max_new_tokens=16, ignore_eos=True)
    control, trajectory = trajectory_of(runtime, [1] * 8, options)
    result = runtime.generate([1] * 8, options, budget=budget, drafter=OracleDrafter(trajectory.lookup, 8))
    assert result.token_ids == control.token_ids
    assert result.nfe == 2 * (1 + -(-7 // (budget + 1)))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_replay_counts_the_passes_of_real_decoding(temperature, tiny_runtime):
    from spot_deploy.runtime.drafters import SpotDrafter
    from spot_deploy.runtime.noise import Noise

    options = DecodeOptions(temperature=temperature, seed=5, max_new_tokens=40, ignore_eos=True)
    _, trajectory = trajectory_of(tiny_runtime, [5, 6, 7], options)
    noise = Noise(5) if temperature else None
    drafters = {"spot": SpotDrafter(tiny_runtime.order_model)}
    drafters |= {f"oracle {top}": OracleDrafter(trajectory.lookup, top) for top in (None, 2, 32)}
    for drafter in drafters.values():
        for budget in (3, 8):
            real = tiny_runtime.generate([5, 6, 7], options, budget=budget, drafter=drafter)
            assert trajectory.passes(drafter, budget, noise) == real.nfe


def test_stops_at_the_end_of_the_block_that_holds_a_stop_id():
    target = ToyTarget(width=4, vocab=7, mask_id=6)
    target.base[:] = 0
    target.base[:, 2] = 50.0
    target.base[2, 0] = 99.0  # the stop id, third in every block
    runtime = toy_runtime(target)
    result = runtime.generate([1, 1, 1, 1], max_new_tokens=12)
    assert (result.token_ids, result.finish_reason) == ([2, 2], "stop")
    assert result.commits == 4
    long = runtime.generate([1, 1, 1, 1], max_new_tokens=12, ignore_eos=True)
    assert (long.token_ids, long.finish_reason) == ([2, 2, 0, 2] * 3, "length")
    # A stop id in the prompt's own part of the block does not end the generation.
    assert runtime.generate([1, 1, 0], max_new_tokens=5).token_ids == [2, 2, 2]


def test_prompt_and_generation_may_fill_the_capacity_and_not_more():
    target = ToyTarget(width=4)
    runtime = toy_runtime(target)
    assert len(runtime.generate([1] * 60, max_new_tokens=4, ignore_eos=True).token_ids) == 4
    assert len(runtime.generate([1] * 3, max_new_tokens=61, ignore_eos=True).token_ids) == 61
    for prompt, new in ((61, 4), (64, 1), (1, 64)):
        with pytest.raises(SpotDeployError, match="do not fit") as caught:
            runtime.generate([1] * prompt, max_new_tokens=new)
        assert caught.value.exit_code == 2


def test_empty_prompt_starts_from_bos_where_there_is_one():
    target = ToyTarget()
    runtime = toy_runtime(target)
    assert runtime.generate([], max_new_tokens=6).token_ids == runtime.generate([1], max_new_tokens=6).token_ids


def test_no_round_carries_a_full_state_and_bucket_depends_on_the_block_alone():
    target = ToyTarget(width=4)
    runtime = toy_runtime(target)
    runtime.generate([1] * 6, max_new_tokens=40, ignore_eos=True, budget=5)
    assert max(shape[0] for shape in target.calls) == 6
    assert [target.decoding.bucket(n) for n in (0, 4, 8, 9, 32, 33)] == [8, 8, 8, 32, 32, 64]


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": 0.001},
        {"temperature": float("nan")},
        {"budget": -1},
        {"budget": 1.5},
        {"gamma": -0.1},
        {"tau": 0},
        {"hedge_gate": 2},
        {"hedge_weights": "heavy"},
        {"verifier": "trust"},
        {"seed": -1},
        {"seed": 2**64},
        {"max_new_tokens": 0},
        {"max_new_tokens": True},
    ],
    ids=str,
)
def test_options_out_of_range_name_themselves(bad):
    with pytest.raises(SpotDeployError) as caught:
        DecodeOptions(**bad)
    assert caught.value.exit_code == 2
    assert next(iter(bad)) in caught.value.wanted
