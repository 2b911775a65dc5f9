"""Passes that a drafter would need, from a draft-free trajectory: no target pass is run again.

Exactness makes this the real number: whatever is drafted, decoding follows the draft-free trajectory of the same seed,
so which drafts are accepted is a matter of comparing with it (a test decodes for real and compares).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from spot_deploy.engines.contracts import Array
from spot_deploy.runtime.decode import why_ended
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


@dataclass(frozen=True)
class Replayed:
    """A pass after an opening.

    Attributes:
        block: counted from the first of the generation.
        states: verified, the root among them.
        accepted: drafts that were.
        ended: why no more were (see decode.Figures.rejections); empty where nothing was drafted.
    """

    block: int
    states: int
    accepted: int
    ended: str


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
    ) -> list[Replayed]:
        """The passes after the openings.

        Args:
            drafter, budget, noise: as `passes`.
            told: of every drafted state, and whether it was accepted.
        """
        rounds = []
        for block, steps in enumerate(self.blocks):
            anchor = 0
            while anchor < len(steps) - 1:
                step, root = steps[anchor], steps[anchor + 1].state
                drafts: list[Node] = []
                if budget and len(root.masked) > 1:
                    drafts = drafter.draft(Round(step.state, step.head, step.commit, root, budget, noise))
                keys = [root.after(*node.path).key for node in drafts]
                drafted = set(keys)
                anchor += 1
                began = anchor
                while anchor + 1 < len(steps) and steps[anchor + 1].state.key in drafted:
                    anchor += 1
                path = {step.state.key for step in steps[began + 1 : anchor + 1]}
                for node, key in zip(drafts, keys, strict=True):
                    told(node, key in path)
                index = 0 if anchor == began else 1 + keys.index(steps[anchor].state.key)
                end = steps[anchor]
                ended = why_ended(drafts, index, end.commit, end.state.after(end.commit)) if drafts else ""
                rounds.append(Replayed(block, 1 + len(drafts), anchor - began, ended))
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
        ranks = [rank for ahead in self.stale_ranks(LOOK_AHEAD) for rank in ahead]
        return ranks.count(0), len(ranks)

    def stale_ranks(self, ahead: int) -> Iterator[list[int]]:
        """For every root, the ranks of the tokens of the next `ahead` commits among their stale candidates.

        0 is the largest stale logit at the commit's position, ties by id; a token that is none of them ranks after all.
        """
        for steps in self.blocks:
            for n, step in enumerate(steps):
                head = step.head
                ranked = np.take_along_axis(head.ids, np.lexsort((head.ids, -head.logits), axis=1), axis=1)
                row = {int(p): m for m, p in enumerate(head.positions)}
                found = []
                for later in steps[n + 1 : n + 1 + ahead]:
                    at = np.flatnonzero(ranked[row[later.commit.position]] == later.commit.token)
                    found.append(int(at[0]) if len(at) else ranked.shape[1])
                yield found
