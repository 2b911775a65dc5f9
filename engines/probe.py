"""The invariance probe: does a state's output depend on its batch mates, even in the last bit?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spot_deploy.engines.contracts import MIN_ROWS, Array, TargetInputs, TargetSession, TargetShape


def probe_invariance(
    session: TargetSession, shape: TargetShape, block_width: int, buckets: Sequence[int], states: int
) -> dict[str, Any]:
    """Compare one state's head and full logits alone with the same among others.

    For every prefix bucket and every number of states S: the state in every row at once; then in a random row among
    random mates, with a random part of its positions computed. Twice per bucket: the opening pair among others.

    Args:
        buckets: prefix sizes to try.
        states: the largest number of states S to try.

    Returns:
        `strict` (everything bit-equal), `max_abs` (largest difference of a logit), `comparisons`, how many of them were
        `unequal`, and what was tried.
    """
    rng = np.random.default_rng(0)
    worst, count, equal = 0.0, 0, 0

    def compare(wanted: list[Array], seen: list[Array]) -> None:
        nonlocal worst, count, equal
        count += 1
        equal += all(np.array_equal(a, b) for a, b in zip(wanted, seen, strict=True))
        finite = np.isfinite(wanted[-1])
        worst = max(worst, float(np.abs(wanted[-1][finite] - seen[-1][finite]).max(initial=0.0)))

    for bucket in buckets:
        pair_shape = (1, shape.kv_heads, bucket, shape.head_dim)
        past = [rng.standard_normal(pair_shape).astype(np.float32) for _ in range(2 * shape.layers)]
        filled = bucket - block_width

        def run(
            tokens: Array, rows: Array, parent: Sequence[int] | None = None, past: Any = past, filled: int = filled
        ) -> list[Array]:
            parents = np.array([parent or [-1] * len(tokens)], np.int64)
            inputs = TargetInputs(
                input_ids=tokens[None],
                position_base=np.where(parents >= 0, filled + block_width, filled),
                parent=parents,
                own_mask=np.zeros((block_width, block_width), np.float32),
                past_len=np.array([filled], np.int64),
                inv_temperature=np.ones(1, np.float32),
                keep=np.zeros((1, 1), np.int64),
                rows=np.repeat(rows, MIN_ROWS) if len(rows) < MIN_ROWS else rows,
                past=past,
            )
            out = session.run(inputs, keep=False)
            logits = np.stack([out.row(i) for i in range(len(rows))])
            return [x[: len(rows)] for x in (out.top_logits, out.top_ids, out.rest_lse)] + [logits]

        state = rng.integers(0, shape.vocab, (1, block_width))
        rows = np.arange(block_width)
        alone = run(state, rows)
        pair = np.concatenate((rng.integers(0, shape.vocab, (1, block_width)), state))
        opened = run(pair, rows + block_width, [-1, 0])
        for size in range(1, states + 1):
            everywhere = run(np.repeat(state, size, axis=0), np.arange(size * block_width))
            for slot in range(size):
                part = slice(slot * block_width, (slot + 1) * block_width)
                compare(alone, [x[part] for x in everywhere])
            tokens = rng.integers(0, shape.vocab, (size, block_width))
            slot = int(rng.integers(size))
            tokens[slot] = state[0]
            some = np.sort(rng.permutation(block_width)[: rng.integers(1, block_width + 1)])
            compare([x[some] for x in alone], run(tokens, some + slot * block_width))
            if size in (3, states):
                tokens[[0, -1]] = pair
                compare(opened, run(tokens, rows + (size - 1) * block_width, [-1] * (size - 1) + [0]))
    return {
        "strict": equal == count,
        "max_abs": worst,
        "comparisons": count,
        "unequal": count - equal,
        "buckets": list(buckets),
        "states": states,
    }
