"""What the target pass returns for one state, and the NumPy twin of the graph's head.

The head proper is every id whose logit is strictly above the K-th largest: backends break ties at that rank differently
and bfloat16 logits tie there often. Ties at the boundary fall into the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spot_deploy.engines.contracts import HEAD_WIDTH, Array


def log_sum_exp(x: Array) -> Array:
    """Over the last axis in float64; -inf where all are -inf."""
    shift = np.maximum(x.max(axis=-1, initial=-np.inf), -1e300)
    with np.errstate(divide="ignore"):
        return np.asarray(shift + np.log(np.exp(x - shift[..., None]).sum(axis=-1)))


def summarise(logits: Array, inv_temperature: float, width: int = HEAD_WIDTH) -> tuple[Array, Array, Array, Array]:
    """Top logits, top ids, rest at T and rest at 1 of full rows [M, V], as the graph computes them."""
    logits = np.asarray(logits, np.float32)
    width = min(width, logits.shape[-1])
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :width]
    rest = logits.copy()
    np.put_along_axis(rest, ids, -np.inf, axis=-1)
    rests = [log_sum_exp(rest.astype(np.float64) * scale).astype(np.float32) for scale in (inv_temperature, 1.0)]
    return np.take_along_axis(logits, ids, axis=-1), ids.astype(np.int64), rests[0], rests[1]


@dataclass(frozen=True)
class Head:
    """The target's output for the masked positions of one state.

    Attributes:
        positions: the masked positions, int64 [M].
        logits, ids: the K largest logits (before the temperature), falling, and their ids [M, K].
        rest_lse: log-sum-exp of logits / T over all other ids [M].
        rest_lse_raw: the same at T = 1, where the confidence is raw; else None.
        inv_temperature: 1 / T; 1 at T = 0.
        row: fetches the full logits [V] of the m-th masked position.
    """

    positions: Array
    logits: Array
    ids: Array
    rest_lse: Array
    rest_lse_raw: Array | None
    inv_temperature: float
    row: Callable[[int], Array]

    @cached_property
    def scaled(self) -> Array:
        """logits / T in float64 [M, K]."""
        return self.logits.astype(np.float64) * self.inv_temperature

    @cached_property
    def in_head(self) -> Array:
        """Which of the K ids belong to the head proper, bool [M, K]."""
        return np.asarray(self.logits > self.logits[:, -1:])

    @cached_property
    def rest(self) -> Array:
        """Log-sum-exp at T of everything outside the head proper, float64 [M]."""
        return self._rest(self.scaled, self.rest_lse)

    @cached_property
    def total(self) -> Array:
        """Log-sum-exp at T of everything, float64 [M]."""
        return np.logaddexp(log_sum_exp(np.where(self.in_head, self.scaled, -np.inf)), self.rest)

    def _rest(self, scaled: Array, rest_lse: Array) -> Array:
        boundary = log_sum_exp(np.where(self.in_head, -np.inf, scaled))
        return np.logaddexp(boundary, rest_lse.astype(np.float64))

    @cached_property
    def _ranked(self) -> tuple[Array, Array]:
        """Logits and rest that confidence is taken from: tempered, or raw where the target says so."""
        if self.rest_lse_raw is None:
            return self.scaled, self.rest
        x = self.logits.astype(np.float64)
        return x, self._rest(x, self.rest_lse_raw)

    def log_odds(self, column: Array) -> Array:
        """Confidence of one head id per row: its logit against the log-sum-exp of all others, summed without it.

        Ranks like the probability, but does not saturate. Tempered, or raw where the target says so.

        Args:
            column: index into the K columns, int [M].
        """
        x, rest = self._ranked
        chosen = np.arange(x.shape[1]) == column[:, None]
        others = log_sum_exp(np.where(self.in_head & ~chosen, x, -np.inf))
        return np.asarray(x[chosen] - np.logaddexp(others, rest))

    def tail_bound(self) -> Array:
        """An upper bound of the confidence that any id outside the head proper can have, float64 [M]."""
        x, rest = self._ranked
        best = np.minimum(x[:, -1], rest)
        head = log_sum_exp(np.where(self.in_head, x, -np.inf))
        return np.where(np.isneginf(head), np.inf, best - head + 1e-6)  # a float32 sum's error on top

    def tail_token(self, index: int, gumbel: Callable[[Array], Array] | None) -> int:
        """Token of the m-th position when an id outside the head proper wins, from the full row.

        Args:
            index: the masked position's index m.
            gumbel: second-level noise of given token ids; None takes the largest logit (lowest id on ties).
        """
        row = self.row(index).astype(np.float64)
        outside = np.flatnonzero(~(row > self.logits[index, -1]) & (row > -np.inf))
        score = row[outside] * self.inv_temperature
        if gumbel is not None:
            score = score + gumbel(outside)
        return int(outside[np.argmax(score)])

    def token_log_odds(self, index: int, token: int) -> float:
        """Confidence of any id at the m-th position, from the full row (see `log_odds`)."""
        x = self.row(index).astype(np.float64)
        if self.rest_lse_raw is None:
            x = x * self.inv_temperature
        return float(x[token] - log_sum_exp(np.delete(x, token)[None])[0])
