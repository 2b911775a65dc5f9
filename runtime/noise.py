"""Addressed Gumbel noise: Philox 4x32-10 at (block, commits, position, token), never drawn in sequence.

One value has the same bits whatever subset is asked for and in whatever order, which is what makes a drafted state
equal the state that draft-free decoding reaches. Source of the generator: Salmon et al. 2011, "Parallel Random Numbers:
As Easy as 1, 2, 3" (Random123); checked against its known-answer vectors in the tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spot_deploy.engines.contracts import Array

TAIL = 2**32 - 2  # reserved token id of "one of the ids outside the head"
_UNIFORM = 2**32 - 4  # reserved token id of uniform numbers
_MULTIPLIER = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Array, Array, Array, Array]:
    """Ten rounds of Philox 4x32 on broadcastable counters; four words of 32 bits each, as uint64 arrays."""
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c, np.uint64) for c in counter))
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _MULTIPLIER[0] * c0, _MULTIPLIER[1] * c2
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


class Noise:
    """The noise of one sample.

    Args:
        seed: 64-bit seed.
        sample: index of the sample under that seed; 0 for the only one.
    """

    def __init__(self, seed: int, sample: int = 0):
        folded = philox4x32((sample, 0, 0, 0), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
        self._key = (int(folded[0]), int(folded[1]))

    def uniform(self, block: int, commits: int, lane: int) -> float:
        """A uniform number in (0, 1), one of several at a commit."""
        high, low, _, _ = philox4x32((block, commits, lane, _UNIFORM >> 1), self._key)
        return (((int(high) << 32 | int(low)) >> 12) + 0.5) / 2.0**52

    def gumbel(self, block: int, commits: int, positions: Array | np.int64, tokens: Array, *, level: int = 0) -> Array:
        """Standard Gumbel values, float32, of the broadcast shape of `positions` and `tokens`.

        Args:
            block: index of the block from the start of the sequence.
            commits: commits so far in the block.
            positions: positions inside the block.
            tokens: token ids, or `TAIL`.
            level: 0 for the draw among head and tail, 1 for the draw inside the tail.
        """
        positions, tokens = np.broadcast_arrays(positions, np.asarray(tokens, np.uint64))
        words = philox4x32((block, commits, positions, tokens >> np.uint64(1)), self._key)
        bits = np.where(tokens & np.uint64(1), words[2 * level + 1], words[2 * level])
        uniform = (bits.astype(np.float64) + 0.5) / 2.0**32
        return (-np.log(-np.log(uniform))).astype(np.float32)
