"""A target under decoding: the cache of one request, and its kinds of passes through the one graph.

Block-causal targets: keys and values of finished blocks are final, and cached as they are (`BlockCausalTarget`).
Full attention: every commit changes them all. Then either what lies outside the block is frozen while the block is
decoded (`FrozenTarget`, the dual cache of Fast-dLLM), or every pass runs whole sequences (`WholeTarget`, exact).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from spot_deploy.engines.contracts import MASKED, MIN_ROWS, Array, TargetInputs, TargetOutputs, TargetSession
from spot_deploy.engines.prefix import Prefix
from spot_deploy.runtime.head import Head
from spot_deploy.runtime.manifest import Decoding
from spot_deploy.runtime.state import State


def block_causal(positions: int, width: int) -> Array:
    """Additive mask [positions, positions]: a position sees its own block and those before."""
    block = np.arange(positions) // width
    return np.where(block[None] <= block[:, None], np.float32(0), np.float32(MASKED))


class Cache:
    """Keys and values of one request outside the segments of a pass, in buffers that the session keeps.

    They have exactly the size of a bucket, which depends on the request's own block index alone, so that draft-free
    decoding and speculation run the same shapes (a growing view would be copied on every pass).
    """

    def __init__(self, session: TargetSession, decoding: Decoding):
        self._session, self._decoding = session, decoding
        self._prefix: Prefix | None = None
        self.length = 0

    def reserve(self, filled: int) -> Prefix:
        """The buffers, as large as the bucket for `filled` positions."""
        size = self._decoding.bucket(filled)
        if self._prefix is None or self._prefix.size != size:
            fresh = self._session.prefix(self._decoding.shape, size)
            if self._prefix is not None and self.length:
                fresh.take(self._prefix, self.length)
            self._prefix = fresh
        return self._prefix

    @property
    def past(self) -> Any:
        """What a pass takes."""
        return self.reserve(self.length).past

    def append(self, kept: Sequence[Any], without: slice = slice(0)) -> None:
        """Write the keys and values [1, 1, H, Q, D] of further positions, but for those that are left out."""
        count = kept[0].shape[3]
        before, after = without.start or 0, count - (without.stop or 0)
        prefix = self.reserve(self.length + before + after)
        if before:
            prefix.write(kept, slice(0, before), self.length)
        if after:
            prefix.write(kept, slice(count - after, count), self.length + before)
        self.length += before + after


class RequestTarget(ABC):
    """The target's passes for one request.

    `begin`, then for every block `first_token` where the target gives it, `open`, any number of `verify`, `finish`.

    Attributes:
        prefill_forwards, store_forwards: passes that commit nothing by themselves.
        refresh_forwards: opening passes over the whole sequence (they are denoise passes, too).
        seconds: inside the engine.
        fetched: bytes of the engine's output that were read: heads, and single rows of logits.
    """

    def __init__(self, session: TargetSession, decoding: Decoding, temperature: float, *, padded: bool = False):
        """`temperature` 0 takes the largest logit; `padded` gives every verification pass a full budget's shape."""
        self._session, self._decoding = session, decoding
        self._inverse = 1 / temperature if temperature > 0 else 1.0
        self._padded = padded or session.fixed_shapes
        self.cache = Cache(session, decoding)
        self.prefill_forwards = 0
        self.store_forwards = 0
        self.refresh_forwards = 0
        self.seconds = 0.0
        self.fetched = 0

    @abstractmethod
    def begin(self, prompt: Array, new_tokens: int) -> None:
        """Take the prompt, int64 [P], and run what must be run before the first block."""

    def first_token(self) -> Head:
        """The target's output for position 0 of the next block, where decoding.given_start."""
        raise NotImplementedError

    @abstractmethod
    def open(self, state: State) -> Head:
        """The opening pass of a block."""

    @abstractmethod
    def verify(self, states: Sequence[State], budget: int) -> list[Head]:
        """One pass over states of the open block, each with a position masked; the target's output for each."""

    @abstractmethod
    def finish(self, tokens: Array) -> None:
        """Take the open block's final tokens, int64 [L]."""

    def _segments(
        self, tokens: Array, rows: list[Array], base: int, own_mask: Array, budget: int, states: Sequence[State]
    ) -> list[Head]:
        """One pass over segments, int64 [S, Q]; `rows` are those of each segment whose head is wanted."""
        width = tokens.shape[1]
        flat = np.concatenate([i * width + part for i, part in enumerate(rows)])
        if self._padded:
            spare = max(0, 1 + budget - len(tokens))
            tokens = np.concatenate((tokens, np.repeat(tokens[:1], spare, axis=0)))
            most = (1 + budget) * self._decoding.block_width
            flat = np.concatenate((flat, np.full(most - len(flat), flat[0])))
        count = len(tokens)
        outputs = self._run(tokens, [base] * count, [-1] * count, own_mask, flat, keep=False)
        return self._heads(outputs, [state.masked for state in states])

    def _heads(self, outputs: TargetOutputs, positions: Sequence[Array]) -> list[Head]:
        heads, first = [], 0
        fetch, raw = outputs.row, outputs.rest_lse_raw  # heads outlive the pass; what it kept need not
        for masked in positions:
            part = slice(first, first + len(masked))

            def row(m: int, first: int = first) -> Array:
                found = fetch(first + m)
                self.fetched += found.nbytes
                return found

            heads.append(
                Head(
                    masked,
                    outputs.top_logits[part],
                    outputs.top_ids[part],
                    outputs.rest_lse[part],
                    None if raw is None else raw[part],
                    self._inverse,
                    row,
                )
            )
            first = part.stop
        return heads

    def _run(
        self,
        tokens: Array,
        base: Sequence[int],
        parent: Sequence[int],
        own_mask: Array,
        rows: Array,
        *,
        keep: bool,
        cache: Cache | None = None,
    ) -> TargetOutputs:
        cache = cache or self.cache
        if len(rows) < MIN_ROWS:
            rows = np.repeat(rows, MIN_ROWS)
        inputs = TargetInputs(
            input_ids=tokens[None],
            position_base=np.array([base], np.int64),
            parent=np.array([parent], np.int64),
            own_mask=own_mask,
            past_len=np.array([cache.length], np.int64),
            inv_temperature=np.array([self._inverse], np.float32),
            keep=np.zeros((1, 1), np.int64),
            rows=rows.astype(np.int64),
            past=cache.past,
        )
        began = time.perf_counter()
        outputs = self._session.run(inputs, keep=keep)
        self.seconds += time.perf_counter() - began
        head = (outputs.top_logits, outputs.top_ids, outputs.rest_lse, outputs.rest_lse_raw)
        self.fetched += sum(array.nbytes for array in head if array is not None)
        return outputs


class BlockCausalTarget(RequestTarget):
    """Passes of a block-causal target.

    Blocks after the first are opened by a two-segment pass, which stores the block before; with `fuse=False` by a store
    pass and an opening, another engine mode. Where the target gives a block's first token, the store pass does so.
    """

    def __init__(
        self, session: TargetSession, decoding: Decoding, temperature: float, *, padded: bool = False, fuse: bool = True
    ):
        super().__init__(session, decoding, temperature, padded=padded)
        self._fuse = fuse
        self._own = np.zeros((decoding.block_width, decoding.block_width), np.float32)
        self._finished: Array | None = None
        self._last: TargetOutputs | None = None  # the last row of the latest stored block

    def begin(self, prompt: Array, new_tokens: int) -> None:
        self.prefill(prompt[: len(prompt) // self._decoding.block_width * self._decoding.block_width])

    def prefill(self, tokens: Array) -> None:
        """Store whole clean blocks from the start of the sequence, int64 [n * L], in chunks."""
        width = self._decoding.block_width
        chunk = max(1, self._decoding.prefill_positions // width) * width
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            self._store(part, block_causal(len(part), width))
            self.prefill_forwards += 1

    def _store(self, tokens: Array, own_mask: Array) -> None:
        last = np.array([len(tokens) - 1])
        outputs = self._run(tokens[None], [self.cache.length], [-1], own_mask, last, keep=True)
        self.cache.append(outputs.kept)
        if self._decoding.given_start:
            self._last = replace(outputs, kept=[])

    def _store_finished(self) -> None:
        if self._finished is not None:
            self._store(self._finished, self._own)
            self.store_forwards += 1
            self._finished = None

    def first_token(self) -> Head:
        self._store_finished()
        assert self._last is not None  # a block without given tokens follows a stored one
        return self._heads(self._last, [np.zeros(1, np.int64)])[0]

    def open(self, state: State) -> Head:
        if not self._fuse:
            self._store_finished()
        if self._finished is None:
            return self.verify([state], budget=0)[0]
        width, start = self._decoding.block_width, self.cache.length
        tokens = np.stack((self._finished, state.tokens))
        outputs = self._run(tokens, [start, start + width], [-1, 0], self._own, width + state.masked, keep=True)
        self.cache.append(outputs.kept)
        self._finished = None
        return self._heads(outputs, [state.masked])[0]

    def verify(self, states: Sequence[State], budget: int) -> list[Head]:
        tokens = np.stack([state.tokens for state in states])
        rows = [state.masked - self._decoding.logit_shift for state in states]
        return self._segments(tokens, rows, self.cache.length, self._own, budget, states)

    def finish(self, tokens: Array) -> None:
        self._finished = tokens

    def whole(self, states: Array) -> TargetOutputs:
        """One pass over states, int64 [S, L], computing every position, masked or not."""
        start, count = self.cache.length, len(states)
        return self._run(states, [start] * count, [-1] * count, self._own, np.arange(states.size), keep=False)


class WholeTarget(RequestTarget):
    """Passes of a target with full attention, each over whole sequences, one for every state: exact, without a cache.

    What follows the open block is there as masks, as in LLaDA's own sampler.
    """

    def begin(self, prompt: Array, new_tokens: int) -> None:
        decoding = self._decoding
        self._origin = decoding.origin(len(prompt))
        self._sequence = np.full(decoding.positions(len(prompt), new_tokens), decoding.mask_id, np.int64)
        self._sequence[: len(prompt)] = prompt
        self._own = np.zeros((len(self._sequence), len(self._sequence)), np.float32)
        self._start = self._origin

    def open(self, state: State) -> Head:
        self._start = self._origin + state.block * self._decoding.block_width
        return self.verify([state], 0)[0]

    def finish(self, tokens: Array) -> None:
        self._sequence[self._start : self._start + len(tokens)] = tokens

    def verify(self, states: Sequence[State], budget: int) -> list[Head]:
        tokens = np.repeat(self._sequence[None], len(states), axis=0)
        for row, state in zip(tokens, states, strict=True):
            row[self._start : self._start + len(state.tokens)] = state.tokens
        rows = [self._start + state.masked - self._decoding.logit_shift for state in states]
        return self._segments(tokens, rows, 0, self._own, budget, states)


class FrozenTarget(WholeTarget):
    """Passes of a target with full attention over a frozen cache (the dual cache of Fast-dLLM, Wu et al. 2025).

    A block is opened by a pass over the whole sequence, whose keys and values outside the block stand still until the
    next one. Not the true model, so never exact; SPOT still equals draft-free decoding in this mode. Where logits are
    shifted, the position before the block is computed along with it, since it predicts the block's first.
    """

    def begin(self, prompt: Array, new_tokens: int) -> None:
        super().begin(prompt, new_tokens)
        self._empty = Cache(self._session, self._decoding)
        self._window = np.zeros((self._decoding.window, self._decoding.window), np.float32)

    def open(self, state: State) -> Head:
        decoding = self._decoding
        self._start = self._origin + state.block * decoding.block_width
        first, stop = self._start - decoding.logit_shift, self._start + decoding.block_width
        self._sequence[self._start : stop] = state.tokens
        rows = self._start + state.masked - decoding.logit_shift
        outputs = self._run(self._sequence[None], [0], [-1], self._own, rows, keep=True, cache=self._empty)
        self.refresh_forwards += 1
        self.cache.length = 0
        self.cache.append(outputs.kept, without=slice(first, stop))
        return self._heads(outputs, [state.masked])[0]

    def verify(self, states: Sequence[State], budget: int) -> list[Head]:
        first = self._start - self._decoding.logit_shift
        before = np.repeat(self._sequence[None, first : self._start], len(states), axis=0)
        tokens = np.concatenate((before, np.stack([state.tokens for state in states])), axis=1)
        # Row i of such a segment predicts position i of the block, shifted or not.
        return self._segments(tokens, [state.masked for state in states], first, self._window, budget, states)


def request_target(
    session: TargetSession,
    decoding: Decoding,
    temperature: float,
    *,
    padded: bool = False,
    fuse: bool = True,
    whole: bool = False,
) -> RequestTarget:
    """The passes for one request in the target's way of attending; `whole`: exact where the cache would be frozen."""
    if decoding.attention == "block-causal":
        return BlockCausalTarget(session, decoding, temperature, padded=padded, fuse=fuse)
    kind = WholeTarget if whole else FrozenTarget
    return kind(session, decoding, temperature, padded=padded)
