"""States of a block, and commits."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from spot_deploy.engines.contracts import Array


@dataclass(frozen=True)
class Commit:
    """One position of a block and the token it takes."""

    position: int
    token: int


@dataclass(frozen=True, eq=False)
class State:
    """A block with some positions committed.

    Attributes:
        block: index of the block from the start of the sequence.
        tokens: int64 [L]; the mask id where nothing is committed.
        mask_id: the target's mask token.
        commits: how many commits led here since the block was opened; addresses the noise.
    """

    block: int
    tokens: Array
    mask_id: int
    commits: int = field(default=0)

    @classmethod
    def opened(cls, block: int, given: Array, width: int, mask_id: int) -> State:
        """A block of `width` positions that holds the `given` tokens at its start, and masks."""
        tokens = np.full(width, mask_id, np.int64)
        tokens[: len(given)] = given
        return cls(block, tokens, mask_id)

    @cached_property
    def masked(self) -> Array:
        """Positions still masked, rising."""
        return np.flatnonzero(self.tokens == self.mask_id)

    @cached_property
    def key(self) -> bytes:
        """The content: equal keys are equal states of the same block."""
        return self.tokens.tobytes()

    def after(self, *commits: Commit) -> State:
        """The state with these commits added."""
        tokens = self.tokens.copy()
        for commit in commits:
            tokens[commit.position] = commit.token
        return State(self.block, tokens, self.mask_id, self.commits + len(commits))
