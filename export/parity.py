"""Parity gates: the exported graphs against the native transformers class with an explicit mask.

`full` runs the ONNX graphs of both layouts on ONNX Runtime: prefill keys and values, denoise, fused opening, a tree of
nine states, the head against its NumPy twin, argmax agreement, and whole commit traces against a straight-line loop
that uses nothing of the runtime but `next_state`. `layers` compares our decoder with the native class one layer at a
time in torch (for checkpoints too large to hold twice). A gate that fails stops the export.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spot_deploy.engines import ort
from spot_deploy.engines.contracts import (
    LAYOUTS,
    Array,
    GraphSignature,
    TargetInputs,
    TargetOutputs,
    TargetSession,
    target_role,
)
from spot_deploy.engines.errors import VERIFICATION, SpotDeployError
from spot_deploy.export.checkpoint import Checkpoint
from spot_deploy.export.decoder import Decoder, masked_attend
from spot_deploy.export.target_graph import TargetGraph
from spot_deploy.runtime.decode import DecodeOptions, Figures, decode
from spot_deploy.runtime.head import Head, summarise
from spot_deploy.runtime.manifest import Decoding
from spot_deploy.runtime.noise import Noise
from spot_deploy.runtime.sampler import next_state
from spot_deploy.runtime.state import Commit, State
from spot_deploy.runtime.target import RequestTarget, block_causal

MODES = ("full", "layers", "none")
TOLERANCE = 1e-4  # of a logit, float32, for logits up to 10; in proportion above
# The same for 16-bit graphs: twenty roundings of the largest value (seen: up to ten).
HALF_TOLERANCES = {"f16": 10 * 20 * 2**-11, "bf16": 10 * 20 * 2**-8}
TREE_STATES = 9
TRACE_TOKENS = 48
ARGMAX_FLOOR = 0.1  # a graph that takes a wrong weight for right agrees about as often as chance


@dataclass(frozen=True)
class Trace:
    """A golden trace: commits as [block, position, token]."""

    prompt: list[int]
    temperature: float
    seed: int
    max_new_tokens: int
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
    """The native class of the family under an explicit block-causal mask."""

    def __init__(self, checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]):
        self.decoding = checkpoint.decoding
        self.model = load_native(checkpoint, tensors)
        self.ban = torch.where(checkpoint.banned, -torch.inf, 0.0)

    def logits(self, tokens: Array) -> Array:
        """Float32 logits [B, N, vocab] of whole sequences [B, N], banned ids at -inf."""
        with torch.no_grad():
            return np.asarray((self._forward(tokens, False).logits.float() + self.ban).numpy())

    def keys_and_values(self, tokens: Array) -> list[Array]:
        """k.0, v.0, k.1, ... [1, kv_heads, N, head_dim] of one sequence."""
        with torch.no_grad():
            output = self._forward(tokens[None], True)
        cache = output[next(name for name in ("cache", "past_key_values") if name in output)]  # renamed in 5.x
        return [t.float().numpy() for layer in cache.layers for t in (layer.keys, layer.values)]

    def _forward(self, tokens: Array, use_cache: bool) -> Any:
        length = tokens.shape[1]
        mask = torch.from_numpy(block_causal(length, self.decoding.block_width))[None, None]
        return self.model(
            input_ids=torch.from_numpy(tokens),
            attention_mask=mask.expand(len(tokens), 1, length, length),
            position_ids=torch.arange(length)[None].expand(len(tokens), -1),
            use_cache=use_cache,
        )


def load_native(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The native class with the checkpoint's weights, strictly loaded."""
    model = checkpoint.family.native(checkpoint.config, checkpoint.spec.layers)
    names = checkpoint.family.tensor_names(checkpoint.spec)
    weights = {names[own]: tensor for own, tensor in tensors.items()}
    if checkpoint.spec.tied_head:
        weights["lm_head.weight"] = tensors["embed.weight"]
    model.load_state_dict(weights, strict=True)
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


class TorchTarget:
    """A target graph's module as a session, in torch: what is traced, for dtypes that no engine here computes in."""

    def __init__(self, graph: TargetGraph, signature: GraphSignature):
        self._graph, self._names = graph.eval(), [t.name for t in signature.outputs]
        self._past, self._kept = signature.past_names, signature.kept_names
        self._dtype = graph.decoder.embed.weight.dtype

    def run(self, inputs: TargetInputs, *, keep: bool) -> TargetOutputs:
        """One pass; keys and values are float32 outside."""
        feeds = {name: torch.from_numpy(array) for name, array in inputs.feeds(self._past).items()}
        past = [feeds.pop(name).to(self._dtype) for name in self._past]
        with torch.no_grad():
            outputs = self._graph(**feeds, past=past)
        found = dict(zip(self._names, outputs, strict=True))
        arrays = {name: (x.float() if name in self._kept else x).numpy() for name, x in found.items()}
        return TargetOutputs(
            top_logits=arrays["top_logits"],
            top_ids=arrays["top_ids"],
            rest_lse=arrays["rest_lse"],
            rest_lse_raw=arrays.get("rest_lse_raw"),
            row=arrays["logits"].__getitem__,
            kept=[arrays[name] for name in self._kept] if keep else [],
        )


class Gate:
    """Collects what was measured and raises at the first failure.

    Args:
        tolerance: of a value up to 10; in proportion above.
    """

    def __init__(self, tolerance: float = TOLERANCE) -> None:
        self.tolerance = tolerance
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
        if not difference <= allowed:
            raise _failed(name, f"largest difference {difference:.3g}", f"at most {allowed:.3g}")

    def argmax(self, name: str, seen: Array, wanted: Array) -> None:
        """Equal best token wherever the margin is above what rounding explains."""
        best = wanted.argmax(-1)
        differs = np.flatnonzero(seen.argmax(-1).ravel() != best.ravel())
        top = np.sort(wanted.reshape(-1, wanted.shape[-1]), -1)
        margin = (top[:, -1] - top[:, -2])[differs]
        self.measured[name] = {"rows": int(best.size), "differ": len(differs), "margins": margin.tolist()}
        if (margin > 2 * self.allowed(wanted)).any():  # either logit may be off
            raise _failed(name, f"{len(differs)} of {best.size} rows differ, margin up to {margin.max():.3g}", "equal")


def _failed(name: str, seen: str, wanted: str) -> SpotDeployError:
    return SpotDeployError(
        "parity",
        f"the parity gate {name} failed: the exported graph computes something else than the checkpoint",
        seen=seen,
        wanted=wanted,
        fix="nothing was written; report the checkpoint and the versions of torch and onnxruntime",
        exit_code=VERIFICATION,
    )


def own_golden(checkpoint: Checkpoint, graph: Path, prompt: list[int]) -> tuple[list[Trace], GoldenPass]:
    """A short trace and a pass of the exported graph itself, for bundles whose gates ran without the native class."""
    decoding = checkpoint.decoding
    session = ort.Target(graph, decoding.shape.signature(), 1)
    wanted = Trace(prompt, 0.0, 0, decoding.block_width, [])
    clean, states = golden_inputs(checkpoint)
    clean = clean[: 3 * decoding.block_width]
    target = RequestTarget(session, decoding, 0.0)
    target.prefill(clean)
    out = target.whole(states)
    golden = GoldenPass(clean, states, out.top_logits, out.top_ids)
    return [replace(wanted, commits=_onnx_trace(session, decoding, wanted))], golden


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
    gate = Gate()
    wanted = [
        _native_trace(native, prompt, temperature, seed)
        for seed, prompt in enumerate(prompts)
        for temperature in (0.0, 1.0)
    ]
    for layout in LAYOUTS:
        session = ort.Target(graphs[layout], checkpoint.decoding.shape.signature(), 1)
        golden = _elementwise(gate, layout, native, session, checkpoint)
        for index, (trace, margins) in enumerate(wanted):
            seen = _onnx_trace(session, checkpoint.decoding, trace)
            _compare_traces(gate, f"{layout}.trace{index}", seen, trace.commits, margins)
    return gate.measured, [trace for trace, _ in wanted], golden


def half_parity(
    checkpoint: Checkpoint,
    decoder: Decoder,
    precision: str,
    modules: Mapping[str, TargetGraph],
    graphs: Mapping[str, Path],
) -> dict[str, Any]:
    """16-bit graphs against our decoder in float32.

    The traced modules run in torch, in the graphs' own dtype. Float16 files run on ONNX Runtime as well, which has no
    bfloat16 kernels.

    Args:
        decoder: in float32.
        modules: by layout, in the graphs' dtype.
        graphs: ONNX files by layout.

    Returns:
        What was measured, under names such as `split-f16.tree.logits` and `split-f16.file.tree.logits`.

    Raises:
        SpotDeployError: a value is not finite or off by more than HALF_TOLERANCES, or another token leads by more than
            that explains (exit code 3).
    """
    gate = Gate(HALF_TOLERANCES[precision])
    signature = checkpoint.decoding.shape.signature(precision)
    reference = OwnFloat32(checkpoint, decoder)
    for layout, module in modules.items():
        name = f"{layout}-{precision}"
        _elementwise(gate, name, reference, TorchTarget(module, signature), checkpoint)
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


def _native_trace(native: Native, prompt: list[int], temperature: float, seed: int) -> tuple[Trace, list[float]]:
    """Draft-free decoding by the native class, whole sequence every step: commits, and how clear each one was."""
    decoding = native.decoding
    width = decoding.block_width
    noise = Noise(seed) if temperature else None
    inverse = 1 / temperature if temperature else 1.0
    blocks = decoding.blocks(len(prompt), TRACE_TOKENS)
    sequence = np.full(blocks * width, decoding.mask_id, np.int64)
    sequence[: len(prompt)] = prompt
    commits, margins = [], []
    for block in range(len(prompt) // width, blocks):
        part = slice(block * width, (block + 1) * width)
        state = State(block, sequence[part].copy(), decoding.mask_id)
        while len(state.masked):
            logits = native.logits(sequence[None, : part.stop])[0, part][state.masked]
            top, ids, rest, raw = summarise(logits, inverse)
            raw_rest = raw if decoding.confidence == "raw" else None
            head = Head(state.masked, top, ids, rest, raw_rest, inverse, logits.__getitem__)
            state, commit = next_state(state, head, noise)
            commits.append([block, commit.position, commit.token])
            margins.append(_margin(head))
            sequence[part] = state.tokens
    return Trace(prompt, temperature, seed, TRACE_TOKENS, commits), margins


def _margin(head: Head) -> float:
    """How far the best position is ahead of the second in log-odds of the top token (0 when in doubt)."""
    odds = np.sort(head.log_odds(np.zeros(len(head.positions), np.int64)))
    return float(odds[-1] - odds[-2]) if len(odds) > 1 else float("inf")


def _onnx_trace(session: TargetSession, decoding: Decoding, trace: Trace) -> list[list[int]]:
    options = DecodeOptions(
        max_new_tokens=trace.max_new_tokens,
        temperature=trace.temperature,
        seed=trace.seed,
        ignore_eos=True,
        budget=0,
    )
    seen: list[list[int]] = []

    def observe(state: State, head: Head, commit: Commit) -> None:
        seen.append([state.block, commit.position, commit.token])

    target = RequestTarget(session, decoding, options.temperature)
    for _ in decode(target, decoding, np.array(trace.prompt), options, None, Figures(), observe):
        pass
    return seen


def _compare_traces(
    gate: Gate, name: str, seen: list[list[int]], wanted: list[list[int]], margins: list[float]
) -> None:
    first = next((i for i, (a, b) in enumerate(zip(seen, wanted, strict=True)) if a != b), None)
    gate.measured[name] = {"commits": len(wanted), "first_difference": first}
    if first is not None:
        raise _failed(
            name,
            f"commit {first} is block, position, token = {seen[first]}; the native margin was {margins[first]:.3g}",
            str(wanted[first]),
        )


def layer_parity(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Our decoder against the native class with one layer at a time, in torch.

    Raises:
        SpotDeployError: a layer differs (exit code 3).
    """
    gate = Gate()
    width = checkpoint.decoding.block_width
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, checkpoint.spec.vocab, (2, 3 * width))
    mask = torch.from_numpy(block_causal(3 * width, width))[None, None]
    spec = replace(checkpoint.spec, layers=1)
    single = replace(checkpoint, spec=spec)
    for layer in range(checkpoint.spec.layers):
        prefix = f"layers.{layer}."
        weights = {n: t for n, t in tensors.items() if not n.startswith("layers.")}
        weights |= {n.replace(prefix, "layers.0."): t for n, t in tensors.items() if n.startswith(prefix)}
        ours = Decoder(spec).eval()
        ours.load_state_dict(weights, strict=not spec.tied_head)
        native = Native(single, weights)
        with torch.no_grad():
            positions = torch.arange(3 * width).expand(2, -1)
            hidden, _ = ours(torch.from_numpy(tokens), positions, masked_attend(mask))
            seen = (ours.logits(hidden) + native.ban).numpy()
        wanted = native.logits(tokens).reshape(seen.shape)
        gate.close(f"layer{layer}.logits", seen, wanted)
        gate.argmax(f"layer{layer}.argmax", seen, wanted)
    return gate.measured


def random_states(decoding: Decoding, usable: Array, count: int, seed: int) -> tuple[Array, list[State]]:
    """A prefix of usable ids, int64 [3 * L] (less where the capacity is small), and partly masked states after it."""
    rng = np.random.default_rng(seed)
    width = decoding.block_width
    block = min(3, decoding.max_positions // width - 1)
    tokens = rng.choice(usable, (count, width))
    tokens[rng.random(tokens.shape) < 0.6] = decoding.mask_id
    tokens[:, 0] = decoding.mask_id
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
        traces: golden traces.

    Returns:
        By layout and precision: `logits` (largest difference and cosine) and `argmax` (share of equal ones) on masked
        positions of random tree states, and for every trace the first commit that differs.

    Raises:
        SpotDeployError: a logit is not finite, or fewer than ARGMAX_FLOOR of the best tokens are equal (exit code 3).
    """
    prefix, states = random_states(decoding, usable, TREE_STATES, 2)
    measured: dict[str, Any] = {}

    def logits(session: TargetSession) -> Array:
        target = RequestTarget(session, decoding, 1.0)
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
        for index, trace in enumerate(traces):
            commits = _onnx_trace(session, decoding, trace)
            pairs = zip(commits, trace.commits, strict=True)
            first = next((i for i, (mine, golden) in enumerate(pairs) if mine != golden), None)
            measured[f"{name}.trace{index}"] = {"commits": len(commits), "first_difference": first}
    return measured
