"""Passes that a drafter would need, from a draft-free trajectory: no target pass is run again.

Exactness makes this the real number: whatever is drafted, decoding follows the draft-free trajectory of the same seed,
so which drafts are accepted is a matter of comparing with it (a test decodes for real and compares).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spot_deploy.engines.contracts import Array
from spot_deploy.runtime.drafters import Drafter, Round
from spot_deploy.runtime.head import Head
from spot_deploy.runtime.noise import Noise
from spot_deploy.runtime.state import Commit, State
from spot_deploy.runtime.tree import Node

LOOK_AHEAD = 8


@dataclass(frozen=True)
class Step:
    """One pass of draft-free decoding and the commit that followed."""

    state: State
    head: Head
    commit: Commit


def _no_row(index: int) -> Array:
    raise RuntimeError("full rows were not kept")


class Trajectory:
    """A draft-free trajectory; collect it as a decode's observer.

    Args:
        keep_rows: keep every pass's full logits as well, which drafting from the tail needs.
    """

    def __init__(self, *, keep_rows: bool = False) -> None:
        self._keep_rows = keep_rows
        self.blocks: list[list[Step]] = []

    def __call__(self, state: State, head: Head, commit: Commit) -> None:
        if state.commits == 0:
            self.blocks.append([])
        self.blocks[-1].append(Step(state, head if self._keep_rows else replace(head, row=_no_row), commit))

    def lookup(self, block: int, commits: int) -> Commit | None:
        """The true commit (see drafters.OracleDrafter)."""
        steps = self.blocks[block - self.blocks[0][0].state.block]
        return steps[commits].commit if commits < len(steps) else None

    def final(self, block: int, position: int) -> int | None:
        """The token that a position holds in the end (see drafters.TokenOracle)."""
        for step in self.blocks[block - self.blocks[0][0].state.block]:
            if step.commit.position == position:
                return step.commit.token
        return None

    @property
    def commits(self) -> int:
        return sum(len(steps) for steps in self.blocks)

    def passes(self, drafter: Drafter, budget: int, noise: Noise | None) -> int:
        """NFE with a drafter and budget. `noise`: what the drafter may see (coupled), or None."""
        return len(self.blocks) + len(self.rounds(drafter, budget, noise))

    def rounds(
        self,
        drafter: Drafter,
        budget: int,
        noise: Noise | None,
        told: Callable[[Node, bool], None] = lambda node, accepted: None,
    ) -> list[tuple[int, int]]:
        """The passes after the openings, as (states verified, drafts accepted).

        Args:
            drafter, budget, noise: as `passes`.
            told: of every drafted state, and whether it was accepted.
        """
        rounds = []
        for steps in self.blocks:
            anchor = 0
            while anchor < len(steps) - 1:
                step, root = steps[anchor], steps[anchor + 1].state
                drafts: list[Node] = []
                if budget and len(root.masked) > 1:
                    drafts = drafter.draft(Round(step.state, step.head, step.commit, root, budget, noise))
                drafted = {root.after(*node.path).key for node in drafts}
                anchor += 1
                began = anchor
                while anchor + 1 < len(steps) and steps[anchor + 1].state.key in drafted:
                    anchor += 1
                path = {step.state.key for step in steps[began + 1 : anchor + 1]}
                for node in drafts:
                    told(node, root.after(*node.path).key in path)
                rounds.append((1 + len(drafts), anchor - began))
        return rounds

    def committed(self) -> list[float]:
        """Probability of every committed token at its position; those drawn outside the head are left out."""
        found = []
        for step in (step for steps in self.blocks for step in steps):
            row = int(np.flatnonzero(step.head.positions == step.commit.position)[0])
            columns = np.flatnonzero((step.head.ids[row] == step.commit.token) & step.head.in_head[row])
            if len(columns):
                odds = step.head.log_odds(np.full(len(step.head.positions), columns[0]))[row]
                found.append(float(1 / (1 + np.exp(-odds))))
        return found

    def coverage(self) -> tuple[int, int]:
        """Stale coverage as (covered, all): of the 8 commits after the root, those whose token is the stale argmax.

        The root's own commit is left out: it is exact, not stale.
        """
        covered = total = 0
        for steps in self.blocks:
            for n, step in enumerate(steps):
                head = step.head
                best = np.where(head.logits == head.logits[:, :1], head.ids, np.iinfo(np.int64).max).min(1)
                argmax = dict(zip(head.positions.tolist(), best.tolist(), strict=True))
                ahead: Sequence[Step] = steps[n + 1 : n + 1 + LOOK_AHEAD]
                covered += sum(argmax[s.commit.position] == s.commit.token for s in ahead)
                total += len(ahead)
        return covered, total
