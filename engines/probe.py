"""The invariance probe: does a state's output depend on its batch mates, even in the last bit?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spot_deploy.engines.contracts import MIN_ROWS, Array, TargetInputs, TargetSession, TargetShape


@dataclass
class Comparisons:
    """Counts of comparisons of one kind. `flips`: rows whose best token changed."""

    count: int = 0
    unequal: int = 0
    flips: int = 0
    max_abs: float = 0.0

    def add(self, wanted: Sequence[Array], seen: Sequence[Array]) -> None:
        """Compare heads and full logits, the last of each."""
        self.count += 1
        self.unequal += not all(np.array_equal(a, b) for a, b in zip(wanted, seen, strict=True))
        self.flips += int((wanted[-1].argmax(-1) != seen[-1].argmax(-1)).sum())
        finite = np.isfinite(wanted[-1])
        difference = np.abs(wanted[-1][finite] - seen[-1][finite]).max(initial=0.0)
        self.max_abs = max(self.max_abs, float(np.nan_to_num(difference, nan=np.inf)))

    def as_dict(self) -> dict[str, Any]:
        return {"comparisons": self.count, "unequal": self.unequal, "flips": self.flips, "max_abs": self.max_abs}


@dataclass
class _Probe:
    session: TargetSession
    shape: TargetShape
    width: int
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    isolation: Comparisons = field(default_factory=Comparisons)
    joining: Comparisons = field(default_factory=Comparisons)

    def tokens(self, states: int) -> Array:
        return self.rng.integers(0, self.shape.vocab, (states, self.width))

    def passes(self, filled: int, past: Sequence[Array]) -> Any:
        """A function (tokens [R, S, L], rows) to head and logits of those rows; the prefix is the same for all R."""

        def run(tokens: Array, rows: Array, parents: dict[int, int] | None = None) -> list[Array]:
            requests, states, _ = tokens.shape
            parent = np.full((requests, states), -1, np.int64)
            for child, of in (parents or {}).items():
                parent[:, child] = of
            out = self.session.run(
                TargetInputs(
                    input_ids=tokens,
                    position_base=np.where(parent >= 0, filled + self.width, filled),
                    parent=parent,
                    own_mask=np.zeros((self.width, self.width), np.float32),
                    past_len=np.full(requests, filled, np.int64),
                    inv_temperature=np.ones(requests, np.float32),
                    keep=np.zeros((requests, 1), np.int64),
                    rows=np.repeat(rows, MIN_ROWS) if len(rows) < MIN_ROWS else rows,
                    past=[np.repeat(x, requests, axis=0) for x in past] if requests > 1 else past,
                ),
                keep=False,
            )
            logits = np.stack([out.row(i) for i in range(len(rows))])
            return [x[: len(rows)] for x in (out.top_logits, out.top_ids, out.rest_lse)] + [logits]

        return run

    def bucket(self, size: int, filled: int, states: int, requests: int) -> None:
        pair_shape = (1, self.shape.kv_heads, size, self.shape.head_dim)
        past = [self.rng.standard_normal(pair_shape).astype(np.float32) for _ in range(2 * self.shape.layers)]
        run = self.passes(filled, past)
        width, rows = self.width, np.arange(self.width)
        state, first = self.tokens(1), self.tokens(1)
        pair = np.concatenate((first, state))
        alone = run(state[None], rows)
        opened = run(pair[None], rows + width, {1: 0})
        for count in range(1, states + 1):
            everywhere = run(np.repeat(state, count, axis=0)[None], np.arange(count * width))
            for slot in range(count):
                self.joining.add(alone, [x[slot * width : (slot + 1) * width] for x in everywhere])
            slot = int(self.rng.integers(count))
            part = np.sort(self.rng.permutation(width)[: self.rng.integers(1, width + 1)])
            among = [self._among(run, state[0], slot, count, part) for _ in range(2)]
            self.joining.add([x[part] for x in alone], among[0])
            if count > 1:
                self.isolation.add(*among)
            if count in (3, states) and count > 1:
                mates = self.tokens(count)
                mates[[0, -1]] = pair
                self.joining.add(opened, run(mates[None], rows + (count - 1) * width, {count - 1: 0}))
        for several in sorted({2, requests} & set(range(2, requests + 1))):
            count = min(3, states)
            batch = self.rng.integers(0, self.shape.vocab, (several, count, width))
            batch[-1, -1] = state[0]
            self.joining.add(alone, run(batch, rows + (several * count - 1) * width))

    def _among(self, run: Any, state: Array, slot: int, count: int, part: Array) -> Any:
        mates = self.tokens(count)
        mates[slot] = state
        return run(mates[None], part + slot * self.width)


def probe_invariance(
    session: TargetSession,
    shape: TargetShape,
    block_width: int,
    buckets: Iterable[int],
    states: int,
    requests: int = 1,
    *,
    whole: Mapping[int, int] | None = None,
) -> dict[str, Any]:
    """Compare one state's head and full logits alone with the same among others.

    For every prefix bucket and every number of states S: the state in every row at once; then in a random row among
    random mates, with a random part of its positions computed, twice with other mates. Twice per bucket: the opening
    pair among others. With more than one request: the state in the last of several requests.

    Args:
        buckets: prefix sizes to try.
        states: the largest number of states S to try.
        requests: the largest number of requests.
        whole: lengths of whole sequences that are tried as states, without a prefix, and how many at most of each.

    Returns:
        `strict` (everything bit-equal), `max_abs` (largest difference of a logit), `comparisons`, how many of them were
        `unequal`, what was tried, and the same by kind: `isolation` (one shape, other mates) and `joining` (alone
        against among others).
    """
    buckets = tuple(buckets)
    probe = _Probe(session, shape, block_width)
    for bucket in buckets:
        probe.bucket(bucket, bucket - block_width, states, requests)
    for length, count in (whole or {}).items():
        sequences = _Probe(session, shape, length, probe.rng, probe.isolation, probe.joining)
        sequences.bucket(buckets[0], 0, count, requests)
    kinds = (probe.isolation, probe.joining)
    unequal = sum(kind.unequal for kind in kinds)
    return {
        "strict": unequal == 0,
        "max_abs": max(kind.max_abs for kind in kinds),
        "comparisons": sum(kind.count for kind in kinds),
        "unequal": unequal,
        "isolation": probe.isolation.as_dict(),
        "joining": probe.joining.as_dict(),
        "buckets": list(buckets),
        "whole_sequences": list(whole or {}),
        "states": states,
        "requests": requests,
    }
