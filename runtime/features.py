"""What the order model reads (SPOT, section 3.1; the layout of the 40 columns is ours).

Columns: 0-31 log of the sorted stale top-32 probabilities, clipped at 1e-9, / 10; 32 mass of the rest; 33 exp(-gap) and
34 max(-gap, -8) / 4, where gap is how far the log-odds of the candidate are below the largest among the positions that
the hypothetical prefix leaves masked; 35 these log-odds, clipped to +-40, / 10; 36 exp(-rank / 2) by them;
37 probability of the token that the hypothetical prefix puts here (0 if none); 38 share of positions masked;
39 depth / 32. No token ids. The candidate is the stale top token; where drafts are coupled to the noise of the next
commit, the token that wins with it. Positions without a stale distribution are zero in columns 0-36, those that are not
masked in 33, 34 and 36.

Where a target is sure, log-odds of all positions are large and close together; gap and rank make the next one stand
out. (They took the place of entropy, p1 - p2 and a rank among all: held-out loss .94 in place of .96 after 600 steps.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spot_deploy.engines.contracts import FEATURES, Array
from spot_deploy.runtime.head import Head, log_sum_exp
from spot_deploy.runtime.state import Commit

TOP = 32
MAX_DEPTH = 32
MASKED, BEFORE, ROOT, HYPOTHETICAL = range(4)  # state ids
FEATURES_VERSION = 3  # of these columns
_FLOOR = np.log(1e-9)


@dataclass(frozen=True)
class Stale:
    """The stale distributions of a block, from the last verified pass.

    Attributes:
        width: block width L.
        positions: positions that were masked in that pass [M].
        log_p: log-probabilities of the largest logits, falling [M, <= 32], and their `ids`.
        rest: probability of everything else [M].
        log_odds: of the top token [M].
    """

    width: int
    positions: Array
    log_p: Array
    ids: Array
    rest: Array
    log_odds: Array

    @classmethod
    def of(cls, head: Head, width: int) -> Stale:
        """From the target's output for a state of `width` positions."""
        log_p = (head.scaled - head.total[:, None])[:, :TOP]
        beyond = np.concatenate((head.scaled[:, TOP:], head.rest_lse[:, None].astype(np.float64)), axis=1)
        rest = np.exp(log_sum_exp(beyond) - head.total)
        first = np.zeros(len(log_p), np.int64)
        return cls(width, head.positions, log_p, head.ids[:, :TOP], rest, head.log_odds(first))

    @cached_property
    def static(self) -> Array:
        """Columns 0-32, float32 [L, 40]."""
        columns = np.zeros((self.width, FEATURES), np.float32)
        clipped = np.maximum(self.log_p, _FLOOR)
        filled = np.full((len(clipped), TOP), _FLOOR)
        filled[:, : clipped.shape[1]] = clipped
        columns[self.positions, :TOP] = filled / 10
        columns[self.positions, 32] = np.maximum(self.rest, 1e-9)
        return columns

    @cached_property
    def row(self) -> Array:
        """Index into the M rows by position, -1 where there is none [L]."""
        row = np.full(self.width, -1)
        row[self.positions] = np.arange(len(self.positions))
        return row

    def probability(self, commit: Commit) -> float:
        """Stale probability of a commit's token; 0 outside the top 32."""
        m = self.row[commit.position]
        found = np.flatnonzero(self.ids[m] == commit.token)
        return float(np.exp(self.log_p[m, found[0]])) if len(found) else 0.0


@dataclass(frozen=True)
class OrderInputs:
    """Inputs of the order model for N hypothetical prefixes (contract: engines.contracts)."""

    features: Array
    state_id: Array
    depth: Array
    masked: Array


def _compare(features: Array, masked: Array, positions: Array, log_odds: Array) -> None:
    """Fill columns 33-36: every masked position among the others [N, L, 40], [N, L], [M], [N, M]."""
    odds = np.full(masked.shape, -np.inf)
    odds[:, positions] = log_odds
    features[:, positions, 35] = np.clip(log_odds, -40, 40) / 10
    left = np.where(masked, odds, -np.inf)
    with np.errstate(invalid="ignore"):  # where nothing is masked, or the odds of the best are infinite
        gap = np.nan_to_num(left - left.max(axis=1, keepdims=True), nan=0.0, neginf=-np.inf)
    rank = np.argsort(np.argsort(-left, axis=1, kind="stable"), axis=1)
    features[:, :, 33] = np.where(masked, np.exp(gap), 0)
    features[:, :, 34] = np.where(masked, np.maximum(gap, -8) / 4, 0)
    features[:, :, 36] = np.where(masked, np.exp(-rank / 2), 0)


def order_inputs(
    stale: Stale, prefixes: Sequence[Sequence[Commit]], log_odds: Sequence[Array] | None = None
) -> OrderInputs:
    """Build the order model's inputs.

    Args:
        stale: the stale distributions.
        prefixes: hypothetical prefixes, each the root's commit followed by drafted ones.
        log_odds: of the candidates for the commit after each prefix, N of [M] (see sampler.candidate_odds); None:
            the candidates are the top tokens.
    """
    count = len(prefixes)
    features = np.repeat(stale.static[None], count, axis=0)
    state_id = np.full((count, stale.width), BEFORE)
    state_id[:, stale.positions] = MASKED
    for n, prefix in enumerate(prefixes):
        for i, commit in enumerate(prefix):
            features[n, commit.position, 37] = stale.probability(commit)
            state_id[n, commit.position] = HYPOTHETICAL if i else ROOT
    masked = state_id == MASKED
    odds = np.broadcast_to(stale.log_odds, (count, len(stale.positions))) if log_odds is None else np.stack(log_odds)
    _compare(features, masked, stale.positions, odds)
    depth = np.array([min(len(prefix), MAX_DEPTH) for prefix in prefixes], np.int64)
    features[:, :, 38] = masked.mean(axis=1, keepdims=True)
    features[:, :, 39] = depth[:, None] / MAX_DEPTH
    return OrderInputs(features, state_id, depth, masked)
