"""Other drafters: they change which passes are run and never the text, and a replay tells how many."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from toy_target import ToyTarget, toy_runtime

from spot_deploy.runtime.decode import DecodeOptions
from spot_deploy.runtime.drafters import OracleDrafter, SpotDrafter, TokenOracle
from spot_deploy.runtime.noise import Noise
from spot_deploy.runtime.rivals import ConfidenceTree, DraftGraph, FreeChain
from spot_deploy.training.draft_graph import choose_graph, count_formulas
from spot_deploy.training.replay import Trajectory


def trajectories(temperature, verifier="coupled", seeds=6):
    """Draft-free runs of a toy target: runtime, prompt, options, result, trajectory, and the noise that drafts see."""
    runtime = toy_runtime(ToyTarget(width=6, vocab=9, mask_id=8, head_width=4, coupling=0.4))
    for seed in range(seeds):
        options = DecodeOptions(
            temperature=temperature, seed=seed, max_new_tokens=17, ignore_eos=True, verifier=verifier
        )
        prompt = np.random.default_rng(seed).integers(0, 8, 3 + seed).tolist()
        trajectory = Trajectory(keep_rows=True)
        control = runtime.generate(prompt, options, budget=0, observe=trajectory)
        noise = Noise(seed) if temperature and verifier == "coupled" else None
        yield runtime, prompt, options, control, trajectory, noise


def rivals(runtime, trajectory, counts):
    spot = runtime.spot_drafter(runtime.resolve(DecodeOptions()))
    fields = {name: getattr(spot, name) for name in ("order_model", "gamma", "tau", "hedge_gate", "hedge_weights")}
    return {
        "tree": spot,
        "chain": replace(spot, chain=True),
        "free": FreeChain(),
        "confidence": ConfidenceTree(),
        "graph": choose_graph(counts, 8),
        "token": TokenOracle(**fields, final=trajectory.final, top=9),
        "joint": OracleDrafter(trajectory.lookup, 9),
    }


def counted(temperature, verifier):
    counts = Counter()
    for *_, trajectory, noise in trajectories(temperature, verifier):
        count_formulas(trajectory, noise, counts)
    return counts


@pytest.mark.parametrize(("temperature", "verifier"), [(0.0, "coupled"), (1.0, "coupled"), (1.0, "uncoupled")])
def test_every_drafter_gives_the_draft_free_text_in_the_passes_that_a_replay_counts(temperature, verifier):
    counts = counted(temperature, verifier)
    accepted = Counter()
    for runtime, prompt, options, control, trajectory, noise in trajectories(temperature, verifier):
        for name, drafter in rivals(runtime, trajectory, counts).items():
            for budget in (1, 3, 8):
                result = runtime.generate(prompt, options, budget=budget, drafter=drafter)
                assert result.token_ids == control.token_ids
                assert result.nfe + result.accepted == result.commits == control.commits
                assert result.nfe == trajectory.passes(drafter, budget, noise)
                accepted[name] += result.accepted
    assert all(accepted[name] > 20 for name in accepted), accepted
    assert accepted["joint"] == max(accepted.values())
    assert accepted["tree"] >= accepted["chain"]


@pytest.mark.parametrize(
    ("budget", "shape"), [(1, (1, 1)), (3, (3, 1)), (6, (3, 2)), (8, (4, 2)), (12, (4, 3)), (20, (5, 4))]
)
def test_the_confidence_tree_is_as_deep_as_it_is_at_least_wide(budget, shape):
    *_, trajectory, _ = list(trajectories(0.0))[3]
    views = []

    class Spy(ConfidenceTree):
        def draft(self, view):
            views.append((view, super().draft(view)))
            return views[-1][1]

    trajectory.passes(Spy(), budget, None)
    view, nodes = max(views, key=lambda pair: len(pair[0].root.masked))
    masked = len(view.root.masked)
    assert masked == 5
    width, depth = shape
    assert max(len(node.path) for node in nodes) == depth
    assert sum(node.parent == -1 for node in nodes) == min(width, masked)
    assert all(node.path[:-1] == (nodes[node.parent].path if node.parent >= 0 else ()) for node in nodes)


def test_a_graph_holds_what_came_true_most_often():
    one, two, both, other = (frozenset(f) for f in ([(0, 0)], [(1, 0)], [(0, 0), (1, 0)], [(2, 0), (3, 0)]))
    counts = Counter({one: 10, two: 4, both: 9, other: 100})
    # `other` has no parent in the graph; `both` counts its parents too, once one of them is there.
    assert choose_graph(counts, 3).formulas == (one, both, two)
    assert choose_graph(counts, 9).formulas == (one, both, two)
    assert choose_graph(Counter(), 3) == DraftGraph(())


def test_states_of_a_graph_are_drafted_once_whatever_order_leads_to_them():
    formulas = tuple(frozenset(f) for f in ([(0, 0)], [(1, 0)], [(0, 0), (1, 0)], [(0, 1)], [(9, 0)], [(0, 0), (9, 0)]))
    *_, trajectory, _ = list(trajectories(0.0))[3]
    seen = []

    class Spy(DraftGraph):
        def draft(self, view):
            nodes = super().draft(view)
            seen.append((view, nodes))
            return nodes

    trajectory.passes(Spy(formulas), 8, None)
    for view, nodes in seen:
        states = [view.root.after(*node.path).key for node in nodes]
        assert len(set(states)) == len(states)
        assert all(len(node.path) < len(view.root.masked) for node in nodes)
        assert all(node.parent < i for i, node in enumerate(nodes))
    assert max(len(nodes) for _, nodes in seen) == 4


def test_a_chain_is_the_tree_where_a_tree_has_no_room():
    """With a budget of 1 both draft the likeliest commit."""
    for runtime, _, _, _, trajectory, noise in trajectories(1.0):
        spot = runtime.spot_drafter(runtime.resolve(DecodeOptions()))
        assert isinstance(spot, SpotDrafter)
        assert trajectory.passes(spot, 1, noise) == trajectory.passes(replace(spot, chain=True), 1, noise)
