"""Which states a draft graph holds: those that came true most often in recorded trajectories (Spiffy, Algorithm 2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from spot_deploy.runtime.drafters import Round
from spot_deploy.runtime.noise import Noise
from spot_deploy.runtime.rivals import DraftGraph, Formula, Guess
from spot_deploy.training.replay import Trajectory

POSITIONS, TOKENS = 8, 3  # ranks that are counted; what came true outside them ends a count


def count_formulas(trajectory: Trajectory, noise: Noise | None, counts: Counter[Formula], *, deepest: int = 8) -> None:
    """Add how often every formula came true after every root of a draft-free trajectory.

    Args:
        noise: what drafts are coupled to, or None.
        deepest: commits of a formula at most.
    """
    for steps in trajectory.blocks:
        for anchor, step in enumerate(steps[:-1]):
            root = steps[anchor + 1].state
            view = Round(step.state, step.head, step.commit, root, deepest, noise)
            formula: set[tuple[int, int]] = set()
            by_rank: list[int] = []
            ahead = [s.commit for s in steps[anchor + 1 :]][: min(deepest, len(root.masked) - 1)]
            for depth, true in enumerate(ahead):
                guess = Guess.of(view, depth)
                if not depth:
                    by_rank = guess.positions[np.argsort(-guess.confidence, kind="stable")].tolist()
                m = int(np.flatnonzero(guess.positions == true.position)[0])
                token = np.flatnonzero(guess.tokens[m, :TOKENS] == true.token)
                rank = by_rank.index(true.position)
                if rank >= POSITIONS or not len(token):
                    break
                formula.add((rank, int(token[0])))
                counts[frozenset(formula)] += 1


def choose_graph(counts: Counter[Formula], budget: int) -> DraftGraph:
    """`budget` formulas, one after another, by their own count and those of the parents that they have in the graph."""
    chosen: list[Formula] = []

    def parents(formula: Formula) -> Iterable[Formula]:
        return (formula - {pair} for pair in formula if len(formula) > 1)

    left = dict(counts)
    while left and len(chosen) < budget:
        there = set(chosen)
        fitting = [f for f in left if len(f) == 1 or any(p in there for p in parents(f))]
        if not fitting:
            break
        best = max(fitting, key=lambda f: (left[f] + sum(counts[p] for p in parents(f)), -len(f)))
        chosen.append(best)
        del left[best]
    return DraftGraph(tuple(chosen))
