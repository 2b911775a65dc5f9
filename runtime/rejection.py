"""Verification of sampled chains by rejection (Leviathan et al. 2023, on the joint law of position and token).

A draft (i, v) drawn from q is accepted with probability min(1, P / q), where P is the law of the target's own next
commit; else the commit is drawn from what P has over q. The law of the output is the target's own; the text of a seed
is not that of draft-free decoding. It needs the full rows of every state on the path, and sorts them: for study.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spot_deploy.engines.contracts import Array, OrderSession
from spot_deploy.runtime.drafters import Round
from spot_deploy.runtime.features import Stale, order_inputs
from spot_deploy.runtime.head import Head
from spot_deploy.runtime.noise import Noise
from spot_deploy.runtime.state import Commit, State
from spot_deploy.runtime.tree import Node

_ACCEPT, _COMMIT, _DRAFT = range(3)  # what a uniform number decides


@dataclass(frozen=True)
class SampledNode(Node):
    """A drafted state, and the law that its commit was drawn from.

    Attributes:
        positions: masked before that commit, rising [M].
        ids: token ids [M, K]; `q`: probability of each as the next commit, of sum 1 [M, K].
    """

    positions: Array
    ids: Array
    q: Array


@dataclass(frozen=True)
class SampledChain:
    """A chain drawn from the order model's positions and the stale distributions' largest tokens."""

    order_model: OrderSession
    tau: float = 1.0

    def draft(self, view: Round) -> list[Node]:
        """A chain of SampledNode; needs the view's noise."""
        assert view.noise is not None
        head, stale = view.stale_head, Stale.of(view.stale_head, len(view.root.tokens))
        nodes: list[Node] = []
        path: tuple[Commit, ...] = ()
        for depth in range(min(view.budget, len(view.root.masked) - 1)):
            inputs = order_inputs(stale, [(view.root_commit, *path)])
            log_q = self.order_model.run(inputs.features, inputs.state_id, inputs.depth, inputs.masked)[0] / self.tau
            left = np.flatnonzero(inputs.masked[0][head.positions])
            order = np.exp(log_q[head.positions[left]] - log_q.max(), dtype=np.float64)
            tokens = np.where(
                head.in_head[left], np.exp(head.scaled[left] - head.scaled[left].max(1, keepdims=True)), 0
            )
            q = (order / order.sum())[:, None] * (tokens / tokens.sum(1, keepdims=True))
            uniform = view.noise.uniform(view.root.block, view.root.commits + depth, _DRAFT)
            row, column = divmod(_draw(q, uniform), q.shape[1])
            path = (*path, Commit(int(head.positions[left[row]]), int(head.ids[left[row], column])))
            nodes.append(SampledNode(depth - 1, path, 1.0, head.positions[left], head.ids[left], q))
        return nodes


def _draw(weights: Array, uniform: float) -> int:
    """Flat index by a uniform number in (0, 1)."""
    cumulated = np.cumsum(weights)
    return int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right").clip(0, cumulated.size - 1))


def commit_law(head: Head) -> Array:
    """P(position, token) of the target's next commit in closed form, float64 [M, V].

    Position i commits v where the confidence of v beats those of the tokens drawn at all other positions; equal ones
    go to the lower position.
    """
    rows = np.stack([head.row(m) for m in range(len(head.positions))]).astype(np.float64)
    p = _softmax(rows * head.inv_temperature)
    confidence = p if head.rest_lse_raw is None else _softmax(rows)
    law = p.copy()
    for j in range(len(p)):
        rising = np.argsort(confidence[j], kind="stable")
        cumulated = np.concatenate(([0.0], np.cumsum(p[j][rising])))
        others = np.arange(len(p)) != j
        below, up_to = (np.searchsorted(confidence[j][rising], confidence, side=side) for side in ("left", "right"))
        lower = np.arange(len(p))[:, None] < j  # of two equal confidences the lower position's wins
        law[others] *= np.where(lower, cumulated[up_to], cumulated[below])[others]
    return np.asarray(law / law.sum())


def _softmax(x: Array) -> Array:
    exponentials = np.exp(x - x.max(axis=1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


def walk(
    states: Sequence[State],
    drafts: Sequence[Node],
    heads: Sequence[Head],
    noise: Noise,
    advance: Callable[[int, Commit], None],
) -> tuple[list[Commit], int, Commit]:
    """Accept drafts of a chain as long as they pass.

    Args:
        states: the root, then the drafted states in order; `heads` are the target's outputs for them.
        advance: told of every commit, with the index of the state that it follows.

    Returns:
        The accepted commits, the index of the last verified state, and the commit drawn there.
    """
    accepted: list[Commit] = []
    while True:
        here = len(accepted)
        state, head = states[here], heads[here]
        law = commit_law(head)
        if here < len(drafts):
            node = drafts[here]
            assert isinstance(node, SampledNode)
            draft = node.path[-1]
            rows = np.searchsorted(head.positions, node.positions)
            row = np.flatnonzero(node.positions == draft.position)[0]
            column = np.flatnonzero(node.ids[row] == draft.token)[0]
            uniform = noise.uniform(state.block, state.commits, _ACCEPT)
            if uniform * node.q[row, column] < law[rows[row], draft.token]:
                advance(here, draft)
                accepted.append(draft)
                continue
            law[rows[:, None], node.ids] -= node.q
            law = np.maximum(law, 0.0)
        flat = _draw(law, noise.uniform(state.block, state.commits, _COMMIT))
        m, token = divmod(flat, law.shape[1])
        commit = Commit(int(head.positions[m]), token)
        advance(here, commit)
        return accepted, here, commit
