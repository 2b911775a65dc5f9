"""A target under decoding: the prefix cache of one request, and its four kinds of passes through the one graph."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from spot_deploy.engines.contracts import MASKED, MIN_ROWS, Array, TargetInputs, TargetOutputs, TargetSession
from spot_deploy.runtime.head import Head
from spot_deploy.runtime.manifest import Decoding
from spot_deploy.runtime.state import State


def block_causal(positions: int, width: int) -> Array:
    """Additive mask [positions, positions]: a position sees its own block and those before."""
    block = np.arange(positions) // width
    return np.where(block[None] <= block[:, None], np.float32(0), np.float32(MASKED))


class PrefixCache:
    """Keys and values of the finished blocks of one request, written in place.

    Each layer's buffers have exactly the size of a bucket, which depends on the request's own block index alone, so
    that draft-free decoding and speculation run the same shapes (a growing view would be copied on every pass).
    """

    def __init__(self, decoding: Decoding):
        self._decoding = decoding
        self.past: list[Array] = []
        self.length = 0

    def reserve(self, filled: int) -> None:
        """Make the buffers the bucket for `filled` prefix positions."""
        shape, bucket = self._decoding.shape, self._decoding.bucket(filled)
        if self.past and self.past[0].shape[2] == bucket:
            return
        old = self.past
        self.past = [np.zeros((1, shape.kv_heads, bucket, shape.head_dim), np.float32) for _ in range(2 * shape.layers)]
        for before, now in zip(old, self.past, strict=False):
            now[:, :, : self.length] = before[:, :, : self.length]

    def append(self, kept: Sequence[Array], positions: int) -> None:
        """Write the keys and values [1, 1, H, Q, D] of the next `positions` clean positions."""
        self.reserve(self.length + positions)
        for buffer, new in zip(self.past, kept, strict=True):
            buffer[:, :, self.length : self.length + positions] = new[:, 0]
        self.length += positions


class RequestTarget:
    """The target's passes for one request.

    Args:
        session: the engine.
        decoding: the manifest's decoding section.
        temperature: 0 takes the largest logit.
        padded: every verification pass has the shape of a full budget.
        fuse: open blocks after the first by a two-segment pass; else by a store pass and an opening.
    """

    def __init__(
        self, session: TargetSession, decoding: Decoding, temperature: float, *, padded: bool = False, fuse: bool = True
    ):
        self._session, self._decoding = session, decoding
        self._inverse = 1 / temperature if temperature > 0 else 1.0
        self._padded, self._fuse = padded, fuse
        self._own = np.zeros((decoding.block_width, decoding.block_width), np.float32)
        self.cache = PrefixCache(decoding)
        self.prefill_forwards = 0
        self.store_forwards = 0
        self.seconds = 0.0  # inside the engine

    def prefill(self, tokens: Array) -> None:
        """Store whole clean blocks from the start of the sequence, int64 [n * L], in chunks."""
        width = self._decoding.block_width
        chunk = max(1, self._decoding.prefill_positions // width) * width
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            self._store(part, block_causal(len(part), width))
            self.prefill_forwards += 1

    def _store(self, tokens: Array, own_mask: Array) -> None:
        start = self.cache.length
        outputs = self._run(tokens[None], [start], [-1], own_mask, np.arange(MIN_ROWS), keep=True)
        self.cache.append(outputs.kept, len(tokens))

    def open_first(self, state: State) -> Head:
        """The opening pass of the first block."""
        return self.verify([state], budget=0)[0]

    def open_next(self, finished: Array, state: State) -> Head:
        """Store the finished block, int64 [L], and open the next one."""
        width = self._decoding.block_width
        if not self._fuse:
            self._store(finished, self._own)
            self.store_forwards += 1
            return self.verify([state], budget=0)[0]
        start = self.cache.length
        tokens = np.stack((finished, state.tokens))
        rows = width + state.masked
        outputs = self._run(tokens, [start, start + width], [-1, 0], self._own, rows, keep=True)
        self.cache.append(outputs.kept, width)
        return self._heads(outputs, [state])[0]

    def verify(self, states: Sequence[State], budget: int) -> list[Head]:
        """One pass over states of the same block, each with a position masked; the target's output for each."""
        width = self._decoding.block_width
        rows = np.concatenate([i * width + state.masked for i, state in enumerate(states)])
        tokens = np.stack([state.tokens for state in states])
        if self._padded:
            spare = max(0, 1 + budget - len(states))
            tokens = np.concatenate((tokens, np.repeat(tokens[:1], spare, axis=0)))
            rows = np.concatenate((rows, np.full((1 + budget) * width - len(rows), rows[0])))
        start, count = self.cache.length, len(tokens)
        outputs = self._run(tokens, [start] * count, [-1] * count, self._own, rows, keep=False)
        return self._heads(outputs, states)

    def whole(self, states: Array) -> TargetOutputs:
        """One pass over states, int64 [S, L], computing every position, masked or not."""
        start, count = self.cache.length, len(states)
        return self._run(states, [start] * count, [-1] * count, self._own, np.arange(states.size), keep=False)

    def _heads(self, outputs: TargetOutputs, states: Sequence[State]) -> list[Head]:
        heads, first = [], 0
        for state in states:
            stop = first + len(state.masked)
            part = slice(first, stop)
            raw = outputs.rest_lse_raw

            def row(m: int, first: int = first) -> Array:
                return outputs.row(first + m)

            heads.append(
                Head(
                    state.masked,
                    outputs.top_logits[part],
                    outputs.top_ids[part],
                    outputs.rest_lse[part],
                    None if raw is None else raw[part],
                    self._inverse,
                    row,
                )
            )
            first = stop
        return heads

    def _run(
        self, tokens: Array, base: Sequence[int], parent: Sequence[int], own_mask: Array, rows: Array, *, keep: bool
    ) -> TargetOutputs:
        self.cache.reserve(self.cache.length)
        if len(rows) < MIN_ROWS:
            rows = np.repeat(rows, MIN_ROWS)
        inputs = TargetInputs(
            input_ids=tokens[None],
            position_base=np.array([base], np.int64),
            parent=np.array([parent], np.int64),
            own_mask=own_mask,
            past_len=np.array([self.cache.length], np.int64),
            inv_temperature=np.array([self._inverse], np.float32),
            keep=np.zeros((1, 1), np.int64),
            rows=rows.astype(np.int64),
            past=self.cache.past,
        )
        began = time.perf_counter()
        outputs = self._session.run(inputs, keep=keep)
        self.seconds += time.perf_counter() - began
        return outputs
