"""The exactness audit: for engines whose logits depend on batch mates in the last bits.

The commits of a run are replayed at the draft-free shape, one state at a time, each from the recorded state, so that
no error carries over. A commit that draft-free decoding would not have made there must be a near tie: with logits off
by at most e, a draw can change only between scores within 2e/T, and a position's log-odds move by at most 2e/T
(both bounds are exact).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spot_deploy.engines.contracts import Array, TargetSession
from spot_deploy.runtime.decode import DecodeOptions
from spot_deploy.runtime.head import Head
from spot_deploy.runtime.manifest import Decoding
from spot_deploy.runtime.noise import Noise
from spot_deploy.runtime.sampler import next_state, perturbed
from spot_deploy.runtime.state import Commit, State
from spot_deploy.runtime.target import request_target


@dataclass(frozen=True)
class Audit:
    """Attributes: commits replayed; near_ties, explained by the bounds; violations, not explained: these are errors."""

    commits: int
    near_ties: int
    violations: int


def audit(
    session: TargetSession,
    decoding: Decoding,
    prompt: Array,
    options: DecodeOptions,
    commits: Sequence[Sequence[int]],
    error: float,
) -> Audit:
    """Replay the commits of a run.

    Args:
        session: the engine.
        prompt: token ids of the prompt.
        options: those of the run.
        commits: its commits in order, each as (position, token).
        error: e, how far a logit may be off (drafted against draft-free: between batch shapes, from the invariance
            probe; a golden trace: what float32 rounds).
    """
    width = decoding.block_width
    noise = Noise(options.seed, options.sample) if options.temperature > 0 else None
    target = request_target(session, decoding, options.temperature, fuse=options.fuse, whole=options.whole)
    target.begin(prompt, options.max_new_tokens)
    origin = decoding.origin(len(prompt))
    near_ties = violations = 0
    state: State | None = None
    given_next = False  # the next commit is the block's first token, which the target gives
    opened = False
    for absolute, token in commits:
        block, position = divmod(absolute - origin, width)
        commit = Commit(position, token)
        if state is None:
            given = prompt[origin + block * width :][:width]
            state, opened = State.opened(block, given, width, decoding.mask_id), False
            given_next = decoding.given_start and not len(given)
        if given_next:
            head = target.first_token()
        elif not opened:
            head, opened = target.open(state), True
        else:
            head = target.verify([state], budget=0)[0]
        if next_state(state, head, noise)[1] != commit:
            explained = near_tie(state, head, noise, commit, error)
            near_ties += explained
            violations += not explained
        state = (
            State.opened(block, np.array([commit.token]), width, decoding.mask_id)
            if given_next
            else state.after(commit)
        )
        given_next = False
        if not len(state.masked):
            target.finish(state.tokens)
            state = None
    return Audit(len(commits), near_ties, violations)


def near_tie(state: State, head: Head, noise: Noise | None, commit: Commit, error: float) -> bool:
    """Whether logits off by at most `error` can make this commit the target's own choice.

    Where an id outside the head is, or could be, drawn, nothing is known of its score, and the position counts as able
    to hold any token with any confidence: the audit is lenient there, and strict among head ids.
    """
    slack = 2 * error * head.inv_temperature
    scores, tail = perturbed(head, state, noise, state.commits)
    best = np.maximum(scores.max(axis=1), tail)
    close = scores >= best[:, None] - slack  # ids that could be drawn
    unknown = (tail >= best - slack) | np.isneginf(scores.max(axis=1))
    m = int(np.flatnonzero(head.positions == commit.position)[0])
    columns = np.flatnonzero(head.ids[m] == commit.token)
    drawn = bool(len(columns)) and bool(close[m, columns[0]])
    if not drawn and not unknown[m]:
        return False
    own = head.token_log_odds(m, commit.token)
    for row in range(len(scores)):
        if row == m or unknown[row]:
            continue
        rivals = [head.token_log_odds(row, int(head.ids[row, c])) for c in np.flatnonzero(close[row])]
        if own + 2 * slack < min(rivals):
            return False
    return True
