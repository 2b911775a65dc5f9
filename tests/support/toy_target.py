"""A target small enough to enumerate: logits are smooth in the state, and depend on the stored prefix.

Smooth (a base plus small effects of every commit), so that stale distributions tell something about fresh ones.
"""

from __future__ import annotations

import numpy as np

from spot_deploy.engines.contracts import TargetInputs, TargetOutputs, TargetShape
from spot_deploy.engines.prefix import HostSession
from spot_deploy.runtime.api import Runtime
from spot_deploy.runtime.decode import DecodeOptions
from spot_deploy.runtime.head import summarise
from spot_deploy.runtime.manifest import Decoding


class ToyTarget(HostSession):
    """A target session. Each segment is computed alone, so it is batch-invariant by construction.

    The one layer's keys are the stored tokens themselves (values: their positions), which makes a wrong or shifted
    prefix visible in the logits.
    """

    def __init__(self, width=4, vocab=7, mask_id=6, head_width=3, scale=2.0, coupling=0.6, raw=False, seed=0):
        rng = np.random.default_rng(seed)
        self.width, self.vocab, self.mask_id, self.head_width, self.raw = width, vocab, mask_id, head_width, raw
        self.base = rng.normal(size=(width, vocab)) * scale
        self.effect = rng.normal(size=(width, vocab, width, vocab)) * coupling
        self.past_effect = rng.normal(size=(vocab, width, vocab)) * coupling
        self.calls = []

    @property
    def decoding(self):
        width = self.width
        return Decoding(
            block_width=width,
            mask_id=self.mask_id,
            stop_ids=(0,),
            bos_id=1,
            confidence="raw" if self.raw else "tempered",
            logit_shift=0,
            max_positions=16 * width,
            buckets=(2 * width, 8 * width, 16 * width),
            prefill_positions=2 * width,
            attention="block-causal",
            given_start=False,
            shape=TargetShape(1, 1, 1, self.vocab, self.raw),
        )

    def logits(self, prefix, tokens):
        """Float32 logits [L, vocab] of one state after prefix tokens; the mask is banned."""
        out = self.base.copy()
        for i, token in enumerate(prefix):
            out += self.past_effect[int(token)] * np.cos(i)
        for i, token in enumerate(tokens):
            if token != self.mask_id:
                out += self.effect[i, int(token)]
        out[:, self.mask_id] = -np.inf
        return out.astype(np.float32)

    def run(self, inputs: TargetInputs, *, keep: bool) -> TargetOutputs:
        ids = inputs.input_ids[0]
        self.calls.append(ids.shape)
        filled = int(inputs.past_len[0])
        stored = inputs.past[0][0, 0, :filled, 0]
        np.testing.assert_array_equal(inputs.past[1][0, 0, :filled, 0], np.arange(filled))
        assert len(inputs.rows) >= 2
        rows = np.full((len(ids) * ids.shape[1], self.vocab), np.nan, np.float32)
        for s, tokens in enumerate(ids):
            prefix = list(stored)
            if inputs.parent[0, s] >= 0:
                prefix += list(ids[inputs.parent[0, s]])
            assert int(inputs.position_base[0, s]) == len(prefix)
            if len(tokens) == self.width:  # prefill passes hold several blocks; nobody reads their logits
                rows[s * self.width : (s + 1) * self.width] = self.logits(prefix, tokens)
        picked = rows[inputs.rows]
        top, top_ids, rest, raw = summarise(picked, float(inputs.inv_temperature[0]), self.head_width)
        kept = []
        if keep:
            chosen = ids[inputs.keep[0]]
            positions = inputs.position_base[0][inputs.keep[0]][:, None] + np.arange(ids.shape[1])
            kept = [x[None, :, None, :, None].astype(np.float32) for x in (chosen, positions)]
        return TargetOutputs(top, top_ids, rest, raw if self.raw else None, lambda m: picked[m], kept)


class PlainText:
    """Stands in for the tokenizer: one letter per id."""

    def encode(self, text):
        return [ord(c) - 97 for c in text]

    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids)


class UniformOrder:
    """An order model that prefers positions by a fixed random score."""

    def __init__(self, width, seed=0):
        self.scores = np.random.default_rng(seed).normal(size=width)

    def run(self, features, state_id, depth, masked):
        scores = np.where(masked, self.scores + features[:, :, 35], -np.inf)
        return (scores - np.log(np.exp(scores).sum(1, keepdims=True))).astype(np.float32)


def toy_runtime(target, order_model="default"):
    """A Runtime on a toy target."""
    order = UniformOrder(target.width) if order_model == "default" else order_model
    return Runtime(
        decoding=target.decoding,
        defaults=DecodeOptions(budget=4, gamma=0.0, tau=1.0, hedge_gate=0.6, hedge_weights="normalised"),
        text=PlainText(),
        target=target,
        order_model=order,
        backend="toy",
        exact_budget=256,
    )
