"""Other drafters than SPOT, to measure it against. All are verified by the same walk, so all are exact.

None has a model of the order: they take the order from the stale distributions, or from counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spot_deploy.engines.contracts import Array
from spot_deploy.runtime.drafters import Round
from spot_deploy.runtime.sampler import perturbed
from spot_deploy.runtime.state import Commit
from spot_deploy.runtime.tree import Node

# Position rank and token rank of every commit that leads from the root to a state.
Formula = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Guess:
    """What the stale distributions say of the positions that are masked at the root, for one commit after it.

    Attributes:
        positions: [M].
        tokens: [M, K], best first: by logit, with the noise of that commit where drafts are coupled to it.
        confidence: log-odds of the best token [M].
    """

    positions: Array
    tokens: Array
    confidence: Array

    @classmethod
    def of(cls, view: Round, depth: int) -> Guess:
        """For commit number `depth` + 1 after the root."""
        head = view.stale_head
        scores, _ = perturbed(head, view.stale_state, view.noise, view.root.commits + depth)
        best_first = np.lexsort((head.ids, -scores), axis=1)
        still = np.isin(head.positions, view.root.masked)
        tokens = np.take_along_axis(head.ids, best_first, axis=1)
        return cls(head.positions[still], tokens[still], head.log_odds(best_first[:, 0])[still])

    def most_confident(self, without: Sequence[Commit]) -> Commit:
        """The commit that the stale distributions would make after those that are given; lowest position on ties."""
        open_ones = ~np.isin(self.positions, [commit.position for commit in without])
        m = int(np.where(open_ones, self.confidence, -np.inf).argmax())
        return Commit(int(self.positions[m]), int(self.tokens[m, 0]))


@dataclass(frozen=True)
class FreeChain:
    """A chain by stale confidence: the target's own sampler, run on stale distributions (SSD, arXiv 2510.04147)."""

    def draft(self, view: Round) -> list[Node]:
        path: tuple[Commit, ...] = ()
        nodes: list[Node] = []
        for depth in range(min(view.budget, len(view.root.masked) - 1)):
            path = (*path, Guess.of(view, depth).most_confident(path))
            nodes.append(Node(depth - 1, path, 1.0))
        return nodes


@dataclass(frozen=True)
class ConfidenceTree:
    """The most confident positions as first commits, each continued by stale confidence (BlockSpec-style).

    Source: ICLR 2026 submission 6926 and SPOT's name for it; the shape is ours: as deep as it is at least wide, such
    as 4 chains of 2 for a budget of 8, 5 of 4 for 20.
    """

    def draft(self, view: Round) -> list[Node]:
        deepest = len(view.root.masked) - 1
        depth = min(deepest, max(1, int((np.sqrt(1 + 4 * view.budget) - 1) / 2)))
        if depth < 1:
            return []
        guesses = [Guess.of(view, d) for d in range(depth)]
        first = guesses[0]
        nodes: list[Node] = []
        for m in np.argsort(-first.confidence, kind="stable")[: view.budget // depth]:
            path: tuple[Commit, ...] = (Commit(int(first.positions[m]), int(first.tokens[m, 0])),)
            nodes.append(Node(-1, path, 1.0))
            for guess in guesses[1:]:
                path = (*path, guess.most_confident(path))
                nodes.append(Node(len(nodes) - 1, path, 1.0))
        return nodes


@dataclass(frozen=True)
class DraftGraph:
    """States by ranks of positions and tokens, chosen once by how often they came true (Spiffy, arXiv 2509.18085).

    States that different orders reach are one state, so it is a graph. See training.draft_graph for the choice.

    Attributes:
        formulas: best first; every one of more than one commit has one before it that lacks one of its commits.
    """

    formulas: tuple[Formula, ...]

    def draft(self, view: Round) -> list[Node]:
        most = len(view.root.masked) - 1
        guesses: list[Guess] = []
        by_rank: Array | None = None
        nodes: list[Node] = []
        index: dict[Formula, int] = {}
        for formula in self.formulas:
            if len(nodes) == view.budget:
                break
            parent = next((f for pair in formula if (f := formula - {pair}) in index), None)
            if len(formula) > most or (len(formula) > 1 and parent is None):
                continue
            while len(guesses) < len(formula):
                guesses.append(Guess.of(view, len(guesses)))
            if by_rank is None:
                by_rank = np.argsort(-guesses[0].confidence, kind="stable")
            before = nodes[index[parent]].path if parent else ()
            ((rank, token_rank),) = formula - (parent or frozenset())
            guess = guesses[len(before)]
            if rank >= len(by_rank) or token_rank >= guess.tokens.shape[1]:
                continue
            m = by_rank[rank]
            commit = Commit(int(guess.positions[m]), int(guess.tokens[m, token_rank]))
            index[formula] = len(nodes)
            nodes.append(Node(index[parent] if parent else -1, (*before, commit), 1.0))
        return nodes
