"""`next_state`: the control sampler, the definition of right.

Draft-free decoding, verification, the oracles and trajectory recording all call this one function.
"""

from __future__ import annotations

import numpy as np

from spot_deploy.engines.contracts import Array
from spot_deploy.runtime.head import Head
from spot_deploy.runtime.noise import TAIL, Noise
from spot_deploy.runtime.state import Commit, State


def perturbed(head: Head, state: State, noise: Noise | None, commits: int) -> tuple[Array, Array]:
    """Scores of head ids [M, K] (-inf outside the head proper) and of the tail [M]: logits / T plus Gumbel noise.

    Without noise the tail scores -inf: the largest logit wins. `commits` addresses the noise; a drafter looks ahead
    with it.
    """
    scores = np.where(head.in_head, head.scaled, -np.inf)
    if noise is None:
        return scores, np.full(len(scores), -np.inf)
    positions = head.positions[:, None]
    ids = np.concatenate((head.ids, np.full_like(positions, TAIL)), axis=1)
    gumbel = noise.gumbel(state.block, commits, positions, ids)
    return scores + gumbel[:, :-1], head.rest + gumbel[:, -1]


def winners(scores: Array, ids: Array) -> Array:
    """Column of the largest score per row; the lowest id where scores are equal."""
    best = scores.max(axis=1, keepdims=True)
    return np.asarray(np.where(scores == best, ids, np.iinfo(np.int64).max).argmin(axis=1))


def candidate_odds(head: Head, state: State, noise: Noise | None, commits: int) -> Array:
    """Log-odds of the token that wins at every position with the noise of a commit (see `winner_odds`) [M]."""
    scores, tail = perturbed(head, state, noise, commits)
    column = winners(scores, head.ids)
    return winner_odds(head, column, scores[np.arange(len(column)), column], tail)


def winner_odds(head: Head, column: Array, best: Array, tail: Array) -> Array:
    """Log-odds of the columns that won with scores `best`; where the tail did, the most that its ids can have [M]."""
    return np.where(~(best >= tail) | np.isneginf(best), head.tail_bound(), head.log_odds(column))


def next_state(state: State, head: Head, noise: Noise | None) -> tuple[State, Commit]:
    """The target's own next state: draw a token at every masked position, commit the most confident one.

    Args:
        state: a state with at least one masked position.
        head: the target's output for it.
        noise: the sample's noise at T > 0; None takes the largest logit (T = 0, and the greedy verifier).

    Returns:
        The next state and the commit that leads to it. Equal confidence: lowest position. Equal logits: lowest id.
    """
    scores, tail = perturbed(head, state, noise, state.commits)
    column = winners(scores, head.ids)
    rows = np.arange(len(column))
    best = scores[rows, column]
    in_tail = ~(best >= tail) | np.isneginf(best)
    confidence = np.where(in_tail, -np.inf, head.log_odds(column))
    tokens = head.ids[rows, column]
    if in_tail.any():
        # A full row is fetched only where the tail could still decide the commit.
        threshold = confidence.max()
        for m in np.flatnonzero(in_tail & (head.tail_bound() >= threshold)):
            position = int(head.positions[m])

            def second(ids: Array, position: int = position) -> Array:
                assert noise is not None
                return noise.gumbel(state.block, state.commits, np.int64(position), ids, level=1)

            tokens[m] = head.tail_token(int(m), second if noise is not None else None)
            confidence[m] = head.token_log_odds(int(m), int(tokens[m]))
    chosen = int(confidence.argmax())
    commit = Commit(int(head.positions[chosen]), int(tokens[chosen]))
    return state.after(commit), commit
