"""Drafters: who proposes the states that the target verifies. Whatever they propose, the output is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from spot_deploy.engines.contracts import Array, OrderSession
from spot_deploy.runtime.features import Stale, order_inputs
from spot_deploy.runtime.head import Head
from spot_deploy.runtime.noise import Noise
from spot_deploy.runtime.sampler import perturbed, winner_odds, winners
from spot_deploy.runtime.state import Commit, State
from spot_deploy.runtime.tree import Candidates, Node, grow, grow_chain


@dataclass(frozen=True)
class Round:
    """What a drafter may look at.

    Attributes:
        stale_state, stale_head: the last verified state and the target's output for it.
        root_commit: the commit that leads from there to the root (exact, not a guess).
        root: the root state.
        budget: how many states to draft at most.
        noise: the sample's noise where drafts are coupled to it; else None.
    """

    stale_state: State
    stale_head: Head
    root_commit: Commit
    root: State
    budget: int
    noise: Noise | None


class Drafter(Protocol):
    """Proposes states. Nodes must leave at least one position masked, parents first."""

    def draft(self, view: Round) -> list[Node]: ...


@dataclass(frozen=True)
class SpotDrafter:
    """SPOT: the order model proposes positions, the stale distributions propose tokens (SPOT, section 3).

    Attributes:
        order_model: the order model's session.
        gamma: mass floor.
        tau: temperature of the order model's scores.
        hedge_gate: a second token is drafted where the stale top probability is below it.
        hedge_weights: how mass is shared between first and second token: `normalised` (to sum 1), `raw`
            (their probabilities) or `none` (1 each).
        draft_tail: at T > 0, when an id outside the head wins a drafted position, look it up in the stale full row.
        merge: draft states that several orders lead to once (see tree.grow).
        chain: draft the likeliest chain in place of a tree.
    """

    order_model: OrderSession
    gamma: float = 0.0
    tau: float = 1.0
    hedge_gate: float = 0.6
    hedge_weights: str = "normalised"
    draft_tail: bool = False
    merge: bool = True
    chain: bool = False

    @classmethod
    def of(cls, order_model: OrderSession, options: Any) -> SpotDrafter:
        """With the settings of resolved options (`runtime.decode.DecodeOptions`)."""
        names = ("gamma", "tau", "hedge_gate", "hedge_weights", "draft_tail")
        return cls(order_model, **{name: getattr(options, name) for name in names})

    def draft(self, view: Round) -> list[Node]:
        stale = Stale.of(view.stale_head, len(view.root.tokens))
        by_depth: dict[int, Candidates] = {}

        def order(paths: Sequence[tuple[Commit, ...]]) -> Array:
            odds = [candidates(len(path)).log_odds for path in paths]
            inputs = order_inputs(stale, [(view.root_commit, *path) for path in paths], odds)
            log_q = self.order_model.run(inputs.features, inputs.state_id, inputs.depth, inputs.masked) / self.tau
            q = np.exp(log_q - log_q.max(axis=1, keepdims=True), dtype=np.float64)
            return np.asarray(q / q.sum(axis=1, keepdims=True))

        def candidates(depth: int) -> Candidates:
            # Without noise the tokens do not depend on the depth.
            key = depth if view.noise is not None else 0
            if key not in by_depth:
                by_depth[key] = self._candidates(view, depth, stale)
            return by_depth[key]

        arguments = view.budget, self.gamma, len(view.root.masked) - 1, order, candidates
        return grow_chain(*arguments) if self.chain else grow(*arguments, merge=self.merge)

    def _candidates(self, view: Round, depth: int, stale: Stale) -> Candidates:
        head, state = view.stale_head, view.stale_state
        commits = view.root.commits + depth
        scores, tail = perturbed(head, state, view.noise, commits)
        rows = np.arange(len(scores))
        first = winners(scores, head.ids)
        best = scores[rows, first]
        odds = winner_odds(head, first, best, tail)
        scores[rows, first] = -np.inf
        second = winners(scores, head.ids)
        runner_up = scores[rows, second]
        tokens = np.stack((head.ids[rows, first], head.ids[rows, second]), axis=1)
        # exp(-gap) of the two scores: p2 / p1 at T = 0; with noise, the odds that a small change swaps them.
        ratio = np.exp(np.where(np.isneginf(runner_up), -np.inf, runner_up - np.where(np.isneginf(best), 0, best)))
        if self.hedge_weights == "normalised":
            weights = np.stack((1 / (1 + ratio), ratio / (1 + ratio)), axis=1)
        elif self.hedge_weights == "raw":
            p = np.exp(head.scaled - head.total[:, None])
            weights = np.stack((p[rows, first], p[rows, second]), axis=1)
        else:
            weights = np.stack((np.ones(len(rows)), (ratio > 0).astype(float)), axis=1)
        closed = np.exp(stale.log_p[:, 0]) >= self.hedge_gate
        weights[closed] = (1.0, 0.0)
        weights[np.isneginf(best)] = 0.0
        lost = tail > best
        weights[lost] = 0.0
        if self.draft_tail and view.noise is not None:
            noise = view.noise
            for m in np.flatnonzero(lost):
                position = np.int64(head.positions[m])

                def gumbel(ids: Array, position: np.int64 = position) -> Array:
                    return noise.gumbel(state.block, commits, position, ids, level=1)

                tokens[m, 0] = head.tail_token(int(m), gumbel)
                weights[m, 0] = 1.0
        return Candidates(head.positions, tokens, weights, odds)


@dataclass(frozen=True)
class TokenOracle(SpotDrafter):
    """SPOT's own positions, and the true token wherever it is among the `top` stale candidates.

    Attributes:
        final: the token that a position of a block holds at the end of the draft-free trajectory.
    """

    final: Callable[[int, int], int | None] = lambda block, position: None
    top: int = 1

    def _candidates(self, view: Round, depth: int, stale: Stale) -> Candidates:
        offer = super()._candidates(view, depth, stale)
        scores, _ = perturbed(view.stale_head, view.stale_state, view.noise, view.root.commits + depth)
        ranked = np.take_along_axis(view.stale_head.ids, np.lexsort((view.stale_head.ids, -scores), axis=1), axis=1)
        for m, position in enumerate(offer.positions.tolist()):
            token = self.final(view.root.block, position)
            if token is not None and token in ranked[m, : self.top]:
                offer.tokens[m, 0], offer.weights[m] = token, (1.0, 0.0)
        return offer


@dataclass(frozen=True)
class OracleDrafter:
    """A chain along the true trajectory: the ceiling of what a drafter can gain (SPOT, section 5, live oracles).

    Exactness makes the draft-free trajectory of the same seed the true one, so it is recorded once and looked up here.

    Attributes:
        trajectory: true commits by (block, commits so far in the block).
        top: `None` for the position oracle (true positions, stale top tokens); t for the joint oracle, which also knows
            the true token if it is among the t stale candidates.
    """

    trajectory: Callable[[int, int], Commit | None]
    top: int | None = None

    def draft(self, view: Round) -> list[Node]:
        head = view.stale_head
        row = {int(p): m for m, p in enumerate(head.positions)}
        nodes: list[Node] = []
        path: tuple[Commit, ...] = ()
        for depth in range(min(view.budget, len(view.root.masked) - 1)):
            commits = view.root.commits + depth
            true = self.trajectory(view.root.block, commits)
            if true is None or true.position not in row:
                break  # the end; or, in an engine that is not exact, decoding has left the trajectory
            scores, _ = perturbed(head, view.stale_state, view.noise, commits)
            m = row[true.position]
            ranked = head.ids[m][np.lexsort((head.ids[m], -scores[m]))]
            known = self.top is not None and true.token in ranked[: self.top]
            path = (*path, true if known else Commit(true.position, int(ranked[0])))
            nodes.append(Node(len(nodes) - 1, path, 1.0))
        return nodes
