"""Parity gates: the exported graphs against the native transformers class with an explicit mask.

`full` runs the ONNX graphs of both layouts on ONNX Runtime: prefill keys and values, denoise, fused opening, a tree of
nine states, the head against its NumPy twin, argmax agreement, and whole commit traces against straight-line loops
that use nothing of the runtime but `next_state`. The graphs are the same whatever the attention, so the passes are
compared under block-causal masks; where attention is full, a whole sequence and a tree over a frozen cache as well.
`layers` compares our decoder with the native class one layer at a time in torch (for checkpoints too large to hold).
A gate that fails stops the export.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from spot_deploy.engines import ort
from spot_deploy.engines.contracts import (
    LAYOUTS,
    MASKED,
    Array,
    GraphSignature,
    TargetInputs,
    TargetOutputs,
    TargetSession,
    target_role,
)
from spot_deploy.engines.errors import VERIFICATION, SpotDeployError
from spot_deploy.engines.prefix import HostSession
from spot_deploy.export.checkpoint import Checkpoint
from spot_deploy.export.decoder import (
    Decoder,
    DecoderSpec,
    Layer,
    RMSNorm,
    load_decoder,
    masked_attend,
    parameter_dtype,
    rotary,
)
from spot_deploy.export.families import native_weights
from spot_deploy.export.target_graph import TargetGraph
from spot_deploy.export.trace import HALF_DTYPES
from spot_deploy.runtime.audit import audit
from spot_deploy.runtime.decode import DecodeOptions, Figures, decode
from spot_deploy.runtime.head import Head, summarise
from spot_deploy.runtime.manifest import Decoding
from spot_deploy.runtime.noise import Noise
from spot_deploy.runtime.sampler import next_state
from spot_deploy.runtime.state import State
from spot_deploy.runtime.target import BlockCausalTarget, block_causal, request_target

MODES = ("full", "layers", "none")
TOLERANCE = 1e-4  # of a value, float32, for values up to 10; in proportion above
ROUNDINGS = 8  # or so many times the native class's own distance from float64
# The same for 16-bit graphs: twenty roundings of the largest value (seen: up to ten).
HALF_TOLERANCES = {"f16": 10 * 20 * 2**-11, "bf16": 10 * 20 * 2**-8}
TREE_STATES = 9
HEAD_CHUNK = 8192  # rows of the vocabulary head in float32 at a time
TRACE_TOKENS = 48
JUMPS = 0.02  # share of rows in which a rounding may choose another expert, in float32
ARGMAX_FLOOR = 0.1  # a graph that takes a wrong weight for right agrees about as often as chance


@dataclass(frozen=True)
class Trace:
    """A golden trace: commits as [position, token], positions counted from the start of the sequence.

    `whole`: as DecodeOptions has it. Without commits it is a prompt that nothing was traced for.
    """

    prompt: list[int]
    temperature: float
    seed: int
    max_new_tokens: int
    whole: bool
    commits: list[list[int]]


@dataclass(frozen=True)
class GoldenPass:
    """A tree pass with known results: what `verify` compares engines with. Written to the bundle as arrays.

    Attributes:
        clean: prefix tokens, int64 [3 * L].
        states: int64 [TREE_STATES, L], with positions masked.
        top_logits, top_ids: head of every position, [TREE_STATES * L, k].
    """

    clean: Array
    states: Array
    top_logits: Array
    top_ids: Array


def golden_inputs(checkpoint: Checkpoint) -> tuple[Array, Array]:
    """Random clean tokens of four blocks, int64 [4 * L], and states, int64 [TREE_STATES, L]."""
    decoding = checkpoint.decoding
    rng = np.random.default_rng(1)
    usable = np.flatnonzero(~checkpoint.banned.numpy())
    clean = rng.choice(usable, 4 * decoding.block_width)
    states = rng.choice(usable, (TREE_STATES, decoding.block_width))
    states[rng.random(states.shape) < 0.6] = decoding.mask_id
    states[:, 0] = decoding.mask_id
    return clean, states


class Native:
    """The native class of the family under an explicit mask."""

    def __init__(self, checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor]):
        self.decoding = checkpoint.decoding
        self.model = load_native(checkpoint, tensors)
        self.ban = torch.where(checkpoint.banned, -torch.inf, 0.0)

    def logits(self, tokens: Array, *, full: bool = False) -> Array:
        """Float32 logits [B, N, vocab] of whole sequences [B, N], banned ids at -inf; block-causal, or `full`."""
        with torch.no_grad():
            return np.asarray((self._forward(tokens, full=full).logits.float() + self.ban).numpy())

    def keys_and_values(self, tokens: Array, *, full: bool = False) -> list[Array]:
        """k.0, v.0, k.1, ... [1, kv_heads, N, head_dim] of one sequence."""
        with torch.no_grad():
            output = self._forward(tokens[None], full=full, use_cache=True)
        cache = output[next(name for name in ("cache", "past_key_values") if name in output)]  # renamed in 5.x
        return [t.float().numpy() for layer in cache.layers for t in (layer.keys, layer.values)]

    def rounding(self, clean: Array, states: Array) -> float:
        """How far float32 itself is off float64 on what the gates run: of a value up to 10, in proportion above.

        Trained networks have activations that are thousands of times larger than others, next to which float32 loses
        the small ones, in the native class as in ours.

        Args:
            clean, states: as `golden_inputs` gives them.
        """
        prefix = np.repeat(clean[None, : -states.shape[1]], len(states), axis=0)
        trees = np.concatenate((prefix, states), 1)

        def run() -> list[Array]:
            return [*self.keys_and_values(clean), self.logits(clean[None]), self.logits(trees)]

        single = run()
        self.model.double()
        try:
            double = run()
        finally:
            self.model.float()
        pairs = ((a[np.isfinite(b)], b[np.isfinite(b)]) for a, b in zip(single, double, strict=True))
        return max(float(np.abs(a - b).max()) / max(1.0, float(np.abs(b).max()) / 10) for a, b in pairs)

    def frozen(self, kept: Sequence[Array], first: int, windows: Array) -> Array:
        """Logits [S, Q, vocab] of windows [S, Q] from position `first` on that see themselves and `kept`, keys and
        values of all other positions [1, kv_heads, N, head_dim]."""
        from transformers import DynamicCache

        count, width = windows.shape
        cache: Any = DynamicCache()
        for layer in range(len(kept) // 2):
            pair = [torch.from_numpy(x).expand(count, -1, -1, -1) for x in kept[2 * layer : 2 * layer + 2]]
            cache.update(*pair, layer)
        renamed = "cache" in inspect.signature(self.model.forward).parameters
        with torch.no_grad():
            output = self.model(
                input_ids=torch.from_numpy(windows),
                attention_mask=torch.zeros(count, 1, width, kept[0].shape[2] + width),
                position_ids=torch.arange(first, first + width)[None].expand(count, -1),
                use_cache=True,
                **{"cache" if renamed else "past_key_values": cache},
            )
            return np.asarray((output.logits.float() + self.ban).numpy())

    def _forward(self, tokens: Array, *, full: bool, use_cache: bool = False) -> Any:
        length = tokens.shape[1]
        mask = torch.zeros(1, 1, length, length)
        if not full:
            mask = torch.from_numpy(block_causal(length, self.decoding.block_width))[None, None]
        mask = mask.to(next(self.model.parameters()).dtype)
        return self.model(
            input_ids=torch.from_numpy(tokens),
            attention_mask=mask.expand(len(tokens), 1, length, length),
            position_ids=torch.arange(length)[None].expand(len(tokens), -1),
            use_cache=use_cache,
        )


def load_native(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """The native class with the checkpoint's weights, strictly loaded."""
    model: torch.nn.Module = checkpoint.family.native(checkpoint.config, checkpoint.spec.layers)
    model.load_state_dict(native_weights(checkpoint.spec, tensors), strict=True)
    return model.float().eval()


class OwnFloat32:
    """Our decoder in float32, itself checked against the native class; what 16-bit graphs are compared with."""

    def __init__(self, checkpoint: Checkpoint, decoder: Decoder):
        self.width, self.decoder = checkpoint.decoding.block_width, decoder
        self.ban = torch.where(checkpoint.banned, -torch.inf, 0.0)

    def logits(self, tokens: Array) -> Array:
        """As Native.logits."""
        with torch.no_grad():
            hidden, _ = self._forward(tokens)
            logits = self.decoder.logits(hidden) + self.ban
            return np.asarray(logits.view(*tokens.shape, -1).numpy())

    def keys_and_values(self, tokens: Array) -> list[Array]:
        """As Native.keys_and_values."""
        with torch.no_grad():
            _, kept = self._forward(tokens[None])
        return [tensor.numpy() for pair in kept for tensor in pair]

    def _forward(self, tokens: Array) -> Any:
        length = tokens.shape[1]
        mask = torch.from_numpy(block_causal(length, self.width))[None, None]
        positions = torch.arange(length).expand(len(tokens), -1)
        return self.decoder(torch.from_numpy(tokens), positions, masked_attend(mask))


class RoundedProducts(TorchFunctionMode):
    """Matrix products of 16-bit operands, summed in float32 and rounded once, as tensor cores do.

    Torch's own on processors without units for 16 bits take ten times as long.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        half = func in (F.linear, torch.matmul) and args[0].dtype in HALF_DTYPES.values()
        if not half:
            return func(*args, **kwargs or {})
        return func(*(a if a is None else a.float() for a in args), **kwargs or {}).to(args[0].dtype)


class TorchTarget(HostSession):
    """A target graph's module as a session, in torch: what is traced, for dtypes that no engine here computes in."""

    def __init__(self, graph: TargetGraph, signature: GraphSignature):
        self._graph, self._names = graph.eval(), [t.name for t in signature.outputs]
        self._past, self._kept = signature.past_names, signature.kept_names
        self._dtype = graph.decoder.embed.weight.dtype

    def run(self, inputs: TargetInputs, *, keep: bool) -> TargetOutputs:
        """One pass; keys and values are float32 outside."""
        feeds = {name: torch.from_numpy(array) for name, array in inputs.feeds(self._past).items()}
        past = [feeds.pop(name).to(self._dtype) for name in self._past]
        with torch.no_grad(), RoundedProducts():
            outputs = self._graph(**feeds, past=past)
        found = dict(zip(self._names, outputs, strict=True))
        arrays = {name: (x.float() if name in self._kept else x).numpy() for name, x in found.items()}
        kept = [arrays[name] for name in self._kept] if keep else []
        return TargetOutputs.of(arrays, arrays["logits"].__getitem__, kept)


class Gate:
    """Collects what was measured and raises at the first failure.

    Args:
        tolerance: of a value up to 10; in proportion above.
        half: the network is in 16 bits.
        jumps: the network may jump where a rounding changes which experts are chosen. In float32 such a row is rare,
            and JUMPS of all may be off; in 16 bits only values that are not finite fail, and best tokens that agree no
            more often than chance has it.
    """

    def __init__(self, tolerance: float = TOLERANCE, *, half: bool = False, jumps: bool = False) -> None:
        self.tolerance, self.half, self.jumps = tolerance, half, jumps
        self.measured: dict[str, Any] = {}

    def allowed(self, wanted: Array, tolerance: float | None = None) -> float:
        """What rounding explains, for values of this size."""
        size = float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0))
        return (tolerance or self.tolerance) * max(1.0, size / 10)

    def close(self, name: str, seen: Array, wanted: Array, tolerance: float | None = None) -> None:
        """Elementwise: finite where expected, and close; `tolerance` in place of the gate's own."""
        finite = np.isfinite(wanted)
        same = bool(np.array_equal(np.isfinite(seen), finite))
        difference = float(np.abs(seen[finite] - wanted[finite]).max(initial=0.0)) if same else float("nan")
        allowed = self.allowed(wanted, tolerance)
        self.measured[name] = {"max_abs": difference, "allowed": allowed}
        if self.jumps and same and tolerance is None and difference > allowed:
            rows = np.where(finite, np.abs(np.where(finite, seen, 0) - np.where(finite, wanted, 0)), 0)
            jumped = float((rows.reshape(-1, rows.shape[-1]).max(1) > allowed).mean())
            self.measured[name] |= {"rows_that_jumped": jumped}
            if self.half or jumped <= JUMPS:
                return
        if not difference <= allowed:
            raise _failed(name, f"largest difference {difference:.3g}", f"at most {allowed:.3g}")

    def argmax(self, name: str, seen: Array, wanted: Array) -> None:
        """Equal best token wherever the margin is above what rounding explains."""
        best = wanted.argmax(-1)
        differs = np.flatnonzero(seen.argmax(-1).ravel() != best.ravel())
        top = np.sort(wanted.reshape(-1, wanted.shape[-1]), -1)
        margin = (top[:, -1] - top[:, -2])[differs]
        self.measured[name] = {"rows": int(best.size), "differ": len(differs), "margins": margin.tolist()}
        if self.jumps and self.half:
            if len(differs) > (1 - ARGMAX_FLOOR) * best.size:
                raise _failed(name, f"{len(differs)} of {best.size} rows differ", f"{ARGMAX_FLOOR:.0%} equal")
        elif (margin > 2 * self.allowed(wanted)).sum() > (JUMPS * best.size if self.jumps else 0):
            # either logit may be off
            raise _failed(name, f"{len(differs)} of {best.size} rows differ, margin up to {margin.max():.3g}", "equal")

    def trace(self, name: str, session: TargetSession, decoding: Decoding, wanted: Trace, error: float) -> None:
        """Equal commits, or, by audit, near ties that logits off by `error` explain."""
        seen = _onnx_trace(session, decoding, wanted)
        first = _first_difference(seen, wanted.commits)
        self.measured[name] = {"commits": len(seen), "first_difference": first}
        if first is None:
            return
        replayed = audit(session, decoding, np.array(wanted.prompt), _options(wanted), wanted.commits, error)
        self.measured[name] |= {"near_ties": replayed.near_ties}
        if replayed.violations:
            text = (
                f"commit {first} is position, token = {seen[first]}, and {replayed.violations} commits are no near ties"
            )
            raise _failed(name, text, str(wanted.commits[first]))


def _failed(name: str, seen: str, wanted: str) -> SpotDeployError:
    return SpotDeployError(
        "parity",
        f"the parity gate {name} failed: the exported graph computes something else than the checkpoint",
        seen=seen,
        wanted=wanted,
        fix="nothing was written; report the checkpoint and the versions of torch and onnxruntime",
        exit_code=VERIFICATION,
    )


def untraced(decoding: Decoding, prompt: list[int]) -> Trace:
    """A prompt for bundles whose gates ran without the whole network."""
    return Trace(prompt, 0.0, 0, decoding.block_width, False, [])


def streamed_golden(checkpoint: Checkpoint) -> GoldenPass:
    """A golden pass of our decoder in float32, one layer in memory at a time."""
    decoding, spec = checkpoint.decoding, checkpoint.spec
    clean, states = golden_inputs(checkpoint)
    width, filled = decoding.block_width, 3 * decoding.block_width
    clean = clean[:filled]
    # One sequence, in which the states follow the prefix side by side: each sees the prefix and itself.
    tokens = torch.from_numpy(np.concatenate((clean, states.ravel())))
    block = torch.arange(len(tokens)) // width
    sees = (block[:, None] == block) | ((block[:, None] > block) & (block < 3))
    mask = torch.where(sees, 0.0, MASKED)[None, None]
    positions = torch.cat((torch.arange(filled), torch.arange(filled, filled + width).repeat(len(states))))
    cos, sin = rotary(positions, spec, torch.float32)
    with torch.no_grad():
        x = checkpoint.tensor("embed.weight")[tokens].float()
        for number in range(spec.layers):
            with torch.device("meta"):
                layer = Layer(spec, number)
            prefix = f"layers.{number}."
            weights = {n.removeprefix(prefix): t for n, t in checkpoint.tensors(prefix).items()}
            layer.load_state_dict(weights, assign=True)
            x, _, _ = layer(0, x, cos, sin, 1, masked_attend(mask))
            del layer, weights
        norm = RMSNorm(spec.hidden, spec.norm_eps)
        norm.load_state_dict({"weight": checkpoint.tensor("norm.weight").float()})
        hidden = norm(x[filled:])
        head = checkpoint.tensor("embed.weight" if spec.tied_head else "head.weight")
        logits = torch.cat([hidden @ part.float().T for part in head.split(HEAD_CHUNK)], 1)
        logits += torch.where(checkpoint.banned, -torch.inf, 0.0)
    # A state at a time: the summary is made in float64.
    heads = [summarise(rows, 1.0)[:2] for rows in np.split(logits.numpy(), len(states))]
    return GoldenPass(clean, states, *(np.concatenate(part) for part in zip(*heads, strict=True)))


def full_parity(
    checkpoint: Checkpoint, tensors: dict[str, torch.Tensor], graphs: dict[str, Path], prompts: Sequence[list[int]]
) -> tuple[dict[str, Any], list[Trace], GoldenPass]:
    """Run all gates on both layouts.

    Args:
        graphs: ONNX files by layout.
        prompts: token ids of the golden prompts.

    Returns:
        What was measured, the golden traces, and a golden pass.

    Raises:
        SpotDeployError: a gate failed (exit code 3).
    """
    native = Native(checkpoint, tensors)
    # The native classes have no experts in float64.
    rounding = native.rounding(*golden_inputs(checkpoint)) if checkpoint.spec.moe is None else 0.0
    gate = Gate(max(TOLERANCE, ROUNDINGS * rounding), jumps=checkpoint.spec.moe is not None)
    gate.measured["rounding"] = {"max_abs": rounding, "allowed": gate.tolerance}
    wanted = [
        _native_trace(native, prompt, temperature, seed, whole)
        for seed, prompt in enumerate(prompts)
        for temperature in (0.0, 1.0)
        for whole in ((False,) if checkpoint.decoding.exact_cache else (False, True))
    ]
    for layout in LAYOUTS:
        session = ort.Target(graphs[layout], checkpoint.decoding.shape.signature(), 1)
        golden = _elementwise(gate, layout, native, session, checkpoint)
        if not checkpoint.decoding.exact_cache:
            _full_attention(gate, layout, native, session, checkpoint)
        error = gate.measured[f"{layout}.tree.logits"]["allowed"]
        for index, trace in enumerate(wanted):
            gate.trace(f"{layout}.trace{index}", session, checkpoint.decoding, trace, error)
    return gate.measured, wanted, golden


def half_parity(
    checkpoint: Checkpoint,
    decoder: Decoder,
    precision: str,
    modules: Mapping[str, TargetGraph],
    graphs: Mapping[str, Path],
    traces: Sequence[Trace],
) -> dict[str, Any]:
    """16-bit graphs against our decoder in float32, and how long they follow its golden traces.

    The traced modules run in torch, in the graphs' own dtype. Float16 files run on ONNX Runtime as well, which has no
    bfloat16 kernels.

    Args:
        decoder: in float32.
        modules: by layout, in the graphs' dtype.
        graphs: ONNX files by layout.
        traces: golden traces; the first commit that differs is recorded, and fails nothing.

    Returns:
        What was measured, under names such as `split-f16.tree.logits`, `split-f16.file.tree.logits` and
        `split-f16.trace0`.

    Raises:
        SpotDeployError: a value is not finite or off by more than HALF_TOLERANCES, or another token leads by more than
            that explains (exit code 3).
    """
    gate = Gate(HALF_TOLERANCES[precision], half=True, jumps=checkpoint.spec.moe is not None)
    signature = checkpoint.decoding.shape.signature(precision)
    reference = OwnFloat32(checkpoint, decoder)
    for layout, module in modules.items():
        name = f"{layout}-{precision}"
        session: TargetSession = TorchTarget(module, signature)
        _elementwise(gate, name, reference, session, checkpoint)
        gate.measured |= _followed(name, session, checkpoint.decoding, traces)
        if precision == "f16":
            session = ort.Target(graphs[layout], signature, 1)
            _elementwise(gate, f"{name}.file", reference, session, checkpoint, np.float16)
    return gate.measured


def _elementwise(
    gate: Gate,
    layout: str,
    native: Native | OwnFloat32,
    session: TargetSession,
    checkpoint: Checkpoint,
    cache: npt.DTypeLike = np.float32,
) -> GoldenPass:
    decoding = checkpoint.decoding
    width, shape = decoding.block_width, decoding.shape
    clean, states = golden_inputs(checkpoint)
    opening = np.full(width, decoding.mask_id)
    filled = 3 * width
    bucket = decoding.bucket(filled)

    def run(tokens: Array, start: int, parent: Sequence[int], own: Array, past: Sequence[Array], keep: bool) -> Any:
        count = len(tokens)
        return session.run(
            TargetInputs(
                input_ids=tokens[None],
                position_base=np.array([[start + (width if p >= 0 else 0) for p in parent]]),
                parent=np.array([parent], np.int64),
                own_mask=own.astype(np.float32),
                past_len=np.array([start], np.int64),
                inv_temperature=np.array([0.7], np.float32),
                keep=np.zeros((1, 1), np.int64),
                rows=np.arange(count * tokens.shape[1]),
                past=past,
            ),
            keep=keep,
        )

    def full(out: Any, count: int) -> Array:
        return np.stack([out.row(i) for i in range(count)])

    none = [np.zeros((1, shape.kv_heads, bucket, shape.head_dim), cache) for _ in range(2 * shape.layers)]
    stored = run(clean[None, :filled], 0, [-1], block_causal(filled, width), none, True)
    for index, (seen, wanted) in enumerate(zip(stored.kept, native.keys_and_values(clean[:filled]), strict=True)):
        gate.close(f"{layout}.prefill.{'kv'[index % 2]}.{index // 2}", seen[0, 0], wanted[0])
    past = [buffer.copy() for buffer in none]
    for buffer, kept in zip(past, stored.kept, strict=True):
        buffer[:, :, :filled] = kept[:, 0]
        buffer[:, :, filled:] = 1e3  # what lies beyond past_len must not matter
    zeros = np.zeros((width, width), np.float32)
    prefix = np.repeat(clean[None, :filled], TREE_STATES, axis=0)
    wanted = native.logits(np.concatenate((prefix, states), 1))[:, filled:].reshape(-1, shape.vocab)
    tree = run(states, filled, [-1] * TREE_STATES, zeros, past, False)
    seen = full(tree, len(wanted))
    gate.close(f"{layout}.tree.logits", seen, wanted)
    gate.argmax(f"{layout}.tree.argmax", seen, wanted)
    logits, ids, rest, raw = summarise(seen, float(np.float32(0.7)))
    # The head is float32 in every graph.
    gate.close(f"{layout}.head.top_logits", tree.top_logits, logits, TOLERANCE)
    gate.close(f"{layout}.head.rest_lse", tree.rest_lse, rest, TOLERANCE)
    if tree.rest_lse_raw is not None:
        gate.close(f"{layout}.head.rest_lse_raw", tree.rest_lse_raw, raw, TOLERANCE)
    ours, twin = (np.take_along_axis(seen, chosen, 1) for chosen in (tree.top_ids, ids))
    gate.close(f"{layout}.head.ids", ours, twin, TOLERANCE)
    golden = GoldenPass(clean[:filled], states, *summarise(wanted, 1.0)[:2])
    one = run(states[:1], filled, [-1], zeros, past, False)
    gate.close(f"{layout}.denoise.logits", full(one, width), wanted[:width])
    pair = run(np.stack((clean[filled:], opening)), filled, [-1, 0], zeros, past, True)
    wanted = native.logits(np.concatenate((clean, opening))[None])[0, 4 * width :]
    gate.close(f"{layout}.opening.logits", full(pair, 2 * width)[width:], wanted)
    wanted_kept = native.keys_and_values(clean)
    for index, (seen, whole) in enumerate(zip(pair.kept, wanted_kept, strict=True)):
        gate.close(f"{layout}.opening.{'kv'[index % 2]}.{index // 2}", seen[0, 0], whole[0][:, filled:])
    return golden


def _full_attention(gate: Gate, layout: str, native: Native, session: TargetSession, checkpoint: Checkpoint) -> None:
    """A whole sequence and its keys and values, and a tree of states over what is frozen of it."""
    decoding = checkpoint.decoding
    width = decoding.block_width
    clean, states = golden_inputs(checkpoint)
    prompt = clean[: 2 * width - 1]
    target = request_target(session, decoding, 0.0)
    target.begin(prompt, 2 * width)
    opening = State.opened(0, prompt[:0], width, decoding.mask_id)
    sequence = np.concatenate((prompt, np.full(2 * width, decoding.mask_id)))
    first, stop = len(prompt) - decoding.logit_shift, len(prompt) + width
    predicted = slice(first, first + width)
    seen = np.stack([target.open(opening).row(i) for i in range(width)])
    gate.close(f"{layout}.refresh.logits", seen, native.logits(sequence[None], full=True)[0, predicted])
    kept = [np.delete(x, np.s_[first:stop], axis=2) for x in native.keys_and_values(sequence, full=True)]
    for index, (cached, wanted) in enumerate(zip(target.cache.past, kept, strict=True)):
        name = f"{layout}.refresh.{'kv'[index % 2]}.{index // 2}"
        gate.close(name, cached[:, :, : target.cache.length], wanted)
    partly = [State(0, row, decoding.mask_id) for row in states]
    heads = target.verify(partly, len(partly) - 1)
    seen = np.concatenate([np.stack([h.row(i) for i in range(len(h.positions))]) for h in heads])
    before = np.repeat(sequence[None, first : len(prompt)], len(states), axis=0)
    wanted = native.frozen(kept, first, np.concatenate((before, states), 1))
    gate.close(
        f"{layout}.frozen.logits", seen, np.concatenate([x[s.masked] for x, s in zip(wanted, partly, strict=True)])
    )


def _native_trace(native: Native, prompt: list[int], temperature: float, seed: int, whole: bool) -> Trace:
    """Draft-free decoding by the native class.

    The whole sequence every step, but where attention is full and not `whole`: there, keys and values outside the block
    are those of the block's opening.
    """
    decoding = native.decoding
    width, shift, full = decoding.block_width, decoding.logit_shift, not decoding.exact_cache
    noise = Noise(seed) if temperature else None
    inverse = 1 / temperature if temperature else 1.0
    blocks, origin = decoding.blocks(len(prompt), TRACE_TOKENS), decoding.origin(len(prompt))
    sequence = np.full(origin + blocks.stop * width, decoding.mask_id, np.int64)
    sequence[: len(prompt)] = prompt
    commits = []

    def take(state: State, rows: Array, positions: Array) -> State:
        top, ids, rest, raw = summarise(rows, inverse)
        head = Head(positions, top, ids, rest, raw if decoding.confidence == "raw" else None, inverse, rows.__getitem__)
        state, commit = next_state(state, head, noise)
        commits.append([origin + state.block * width + commit.position, commit.token])
        return state

    for block in blocks:
        start, stop = origin + block * width, origin + (block + 1) * width
        state = State(block, sequence[start:stop].copy(), decoding.mask_id)
        if decoding.given_start and start >= len(prompt):
            last = native.logits(sequence[None, :start])[0, -1:]
            given = take(state, last, np.zeros(1, np.int64))
            state = State(block, given.tokens, decoding.mask_id)
        frozen: list[Array] = []
        while len(state.masked):
            sequence[start:stop] = state.tokens
            if frozen:
                window = sequence[None, start - shift : stop]
                logits = native.frozen(frozen, start - shift, window)[0, :width]
            elif full:
                logits = native.logits(sequence[None], full=True)[0, start - shift : stop - shift]
                if not whole:
                    kept = native.keys_and_values(sequence, full=True)
                    frozen = [np.delete(x, np.s_[start - shift : stop], axis=2) for x in kept]
            else:
                # Where logits are shifted the block's first position is given, and its row of no concern.
                logits = np.roll(native.logits(sequence[None, :stop])[0, start:stop], shift, axis=0)
            state = take(state, logits[state.masked], state.masked)
        sequence[start:stop] = state.tokens
    return Trace(prompt, temperature, seed, TRACE_TOKENS, whole, commits)


def _options(trace: Trace) -> DecodeOptions:
    return DecodeOptions(
        max_new_tokens=trace.max_new_tokens,
        temperature=trace.temperature,
        seed=trace.seed,
        ignore_eos=True,
        budget=0,
        whole=trace.whole,
    )


def _onnx_trace(session: TargetSession, decoding: Decoding, trace: Trace) -> list[list[int]]:
    options = _options(trace)
    target = request_target(session, decoding, options.temperature, whole=trace.whole)
    events = decode(target, decoding, np.array(trace.prompt), options, None, Figures())
    return [[event.position, event.token] for event in events]


def _first_difference(seen: list[list[int]], wanted: list[list[int]]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(seen, wanted, strict=True)) if a != b), None)


def _one_layer(config: Mapping[str, Any], is_moe: bool) -> dict[str, Any]:
    """A config of one layer and hardly any vocabulary, in the field names of all families."""
    few = {"num_hidden_layers": 1, "n_layers": 1, "vocab_size": 8, "embedding_size": 8}
    kind = {
        "first_k_dense_replace": int(not is_moe),
        "mlp_only_layers": [] if is_moe else [0],
        "decoder_sparse_step": 1,
        "moe_layer_freq": [int(is_moe)],
    }
    ids = {key: None for key in config if key.endswith("token_id")}
    changed = {key: value for key, value in {**few, **kind}.items() if key in config}
    return {**config, **changed, **ids, "tie_word_embeddings": False, "weight_tying": False}


def layer_parity(checkpoint: Checkpoint, halves: Sequence[str]) -> dict[str, Any]:
    """Our layers against the native class in torch, one in memory at a time; 16-bit ones against ours in float32.

    Raises:
        SpotDeployError: a layer differs (exit code 3).
    """
    spec, width = checkpoint.spec, checkpoint.decoding.block_width
    gate = Gate(jumps=spec.moe is not None)
    halves_gate = {
        precision: Gate(HALF_TOLERANCES[precision], half=True, jumps=spec.moe is not None) for precision in halves
    }
    mask = torch.from_numpy(block_causal(3 * width, width))[None, None]
    positions = torch.arange(3 * width).expand(2, -1)
    x = torch.randn(2, 3 * width, spec.hidden, generator=torch.Generator().manual_seed(1))
    norm = checkpoint.tensor("norm.weight").float()
    for number in range(spec.layers):
        moe = spec.moe_at(number)
        one = replace(spec, layers=1, vocab=8, tied_head=False, moe=moe and replace(moe, dense_layers=frozenset()))
        prefix = f"layers.{number}."
        # In the stored dtype: with many experts a layer is gigabytes, and float32 copies of it are what counts.
        names = [name for name in checkpoint.dtypes if name.startswith(prefix)]
        weights = {name.replace(prefix, "layers.0."): checkpoint.tensor(name) for name in names}
        weights |= {"norm.weight": norm, **dict.fromkeys(("embed.weight", "head.weight"), torch.zeros(8, spec.hidden))}
        config = _one_layer(checkpoint.config, moe is not None)
        with torch.device("meta"):
            native: Any = checkpoint.family.native(config, 1)
        native.load_state_dict(native_weights(one, weights), strict=True, assign=True)
        native.model.rotary_emb = type(native.model.rotary_emb)(native.config)  # frequencies: no weights of the file
        native.float().eval()
        with torch.no_grad():
            wanted = native.model(inputs_embeds=x, attention_mask=mask, position_ids=positions).last_hidden_state
        del native

        def ours(dtype: torch.dtype, one: DecoderSpec = one, weights: dict[str, torch.Tensor] = weights) -> Array:
            decoder = load_decoder(one, {n: t.to(parameter_dtype(n, dtype)) for n, t in weights.items()})
            with torch.no_grad():
                flat = x.reshape(-1, one.hidden).to(dtype)
                hidden, _ = decoder.through(flat, positions, masked_attend(mask.to(dtype).clamp(min=_least(dtype))))
                return np.asarray(decoder.norm(hidden).view(x.shape).float().numpy())

        seen = ours(torch.float32)
        gate.close(f"layer{number}.hidden", seen, wanted.numpy())
        for precision in halves:
            halves_gate[precision].close(f"layer{number}-{precision}.hidden", ours(HALF_DTYPES[precision]), seen)
    for half in halves_gate.values():
        gate.measured |= half.measured
    return gate.measured


def _least(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).min / 2


def random_states(decoding: Decoding, usable: Array, count: int, seed: int) -> tuple[Array, list[State]]:
    """A prefix of usable ids, int64 [3 * L] (less where the capacity is small), and partly masked states after it."""
    rng = np.random.default_rng(seed)
    width = decoding.block_width
    block = min(3, decoding.max_positions // width - 1)
    tokens = rng.choice(usable, (count, width))
    tokens[rng.random(tokens.shape) < 0.6] = decoding.mask_id
    tokens[:, decoding.logit_shift] = decoding.mask_id
    if decoding.logit_shift:  # no row of the same block predicts its first position
        tokens[:, 0] = usable[0]
    return rng.choice(usable, block * width), [State(block, row, decoding.mask_id) for row in tokens]


def against_f32(
    precision: str, folder: Path, decoding: Decoding, usable: Array, traces: Sequence[Trace]
) -> dict[str, Any]:
    """What the graphs of a precision compute, beside the float32 graphs, on ONNX Runtime.

    Such a graph computes something else by design, and how much depends on the network; so this measures, and fails
    only what cannot be meant.

    Args:
        folder: where the graphs lie, by the names of their layouts.
        usable: ids that may stand in a state.
        traces: golden traces, or prompts that nothing was traced for.

    Returns:
        By layout and precision: `logits` (largest difference and cosine) and `argmax` (share of equal ones) on masked
        positions of random tree states, and for every trace the first commit that differs.

    Raises:
        SpotDeployError: a logit is not finite, or fewer than ARGMAX_FLOOR of the best tokens are equal (exit code 3).
    """
    prefix, states = random_states(decoding, usable, TREE_STATES, 2)
    measured: dict[str, Any] = {}

    def logits(session: TargetSession) -> Array:
        target = BlockCausalTarget(session, decoding, 1.0)
        target.prefill(prefix)
        return np.stack([head.row(i) for head in target.verify(states, 0) for i in range(len(head.positions))])

    for layout in LAYOUTS:
        reference = ort.Target(folder / f"{target_role(layout)}.onnx", decoding.shape.signature(), 1)
        session = ort.Target(
            folder / f"{target_role(layout, precision)}.onnx", decoding.shape.signature(precision), 1, precision
        )
        wanted, seen = logits(reference), logits(session)
        name, finite = f"{layout}-{precision}", np.isfinite(wanted)
        if not np.array_equal(np.isfinite(seen), finite):
            raise _failed(f"{name}.logits", "logits that are not finite", "finite where the float32 graph's are")
        a, b = wanted[finite].astype(np.float64), seen[finite].astype(np.float64)
        norms = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
        cosine = float(a @ b) / norms if norms else 0.0
        measured[f"{name}.logits"] = {"max_abs": float(np.abs(a - b).max(initial=0.0)), "cosine": cosine}
        same = wanted.argmax(-1) == seen.argmax(-1)
        measured[f"{name}.argmax"] = {"rows": len(same), "differ": int((~same).sum()), "agreement": float(same.mean())}
        if same.mean() < ARGMAX_FLOOR:
            raise _failed(
                f"{name}.argmax", f"{same.mean():.1%} of the best tokens equal", f"at least {ARGMAX_FLOOR:.0%}"
            )
        # Without traces of the native class, the float32 graph's own.
        golden = [t if t.commits else replace(t, commits=_onnx_trace(reference, decoding, t)) for t in traces]
        measured |= _followed(name, session, decoding, golden)
    return measured


def _followed(name: str, session: TargetSession, decoding: Decoding, traces: Sequence[Trace]) -> dict[str, Any]:
    """For every golden trace the first commit that an engine of another precision makes differently."""
    measured = {}
    for index, trace in enumerate(traces):
        commits = _onnx_trace(session, decoding, trace)
        first = _first_difference(commits, trace.commits)
        measured[f"{name}.trace{index}"] = {"commits": len(commits), "first_difference": first}
    return measured
