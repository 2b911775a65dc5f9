"""Times the engines of bundles on this processor: decoding, cost curves, and the bound that they set.

Methods take turns prompt by prompt (cost curves: pass by pass), so that drift of the machine meets all of them; figures
are medians over repeats with their spread. Run it alone on the machine. Parts:

* curves: the cost c(S) = t(S) / t(1) of a pass over S states, engine time only (see spot_deploy/costs.py). `opening`:
  the two-segment pass between blocks; `ceiling`: what drafts that are all right and cost nothing would gain.
* decode: tokens/s draft-free and with SPOT at the manifest's budgets. With the curves, also the bound of a free joint
  oracle: the recorded draft-free trajectory is replayed with a drafter that knows the true order, and the true token
  where it is among 32 stale candidates, and that drafts nothing else. Each of its passes is charged t(states) and its
  drafting nothing; the draft-free passes it is compared with are charged t(1). Prefill is left out on both sides.
* torch: the plain loop on the native transformers class: a cache of finished blocks, one commit a pass. Its commits are
  compared with draft-free decoding of the first float32 engine.

`--random SIZE,...` makes targets of random weights in a temporary folder. Their tokens mean nothing, so one prompt of
two blocks is decoded once, a block long, also with the joint oracle as drafter; curves are of half-masked states of
fewer sizes. `1.7b` gives curves only: then no process holds the weights twice.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import inspect
import json
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from spot_deploy import verification
from spot_deploy.costs import MASKS, CurveOptions, cost_curves, pass_seconds, spread
from spot_deploy.engines import backends
from spot_deploy.engines.contracts import GRAPH_PRECISIONS, TargetSession
from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.engines.files import write_json
from spot_deploy.engines.record import EngineInputs, EngineRecord
from spot_deploy.export.bundle_writer import ExportOptions, export_bundle
from spot_deploy.export.checkpoint import Checkpoint, open_checkpoint
from spot_deploy.export.decoder import Decoder
from spot_deploy.export.parity import load_native
from spot_deploy.export.trace import save_graph, trace_target
from spot_deploy.export.weights import WEIGHTS, StoredTensor, stream_weights
from spot_deploy.runtime.api import Runtime
from spot_deploy.runtime.bundle import Bundle, open_bundle
from spot_deploy.runtime.decode import DecodeOptions
from spot_deploy.runtime.drafters import OracleDrafter
from spot_deploy.runtime.noise import Noise
from spot_deploy.runtime.state import Commit
from spot_deploy.runtime.target import block_causal
from spot_deploy.training.prompts import read_prompts
from spot_deploy.training.replay import Trajectory

PARTS = ("curves", "decode", "torch")
SHOWN = (2, 3, 4, 7, 9, 13, 21)  # columns of the printed curves
ORACLE_TOP = 32
NEAR_TIE = 1e-3  # of log-odds: float32 engines may order such a pair differently
DEMO = Path(__file__).resolve().parents[1] / "demo"
RANDOM_POSITIONS = 512
RANDOM_DEFAULTS = {"limit": 1, "repeats": 1, "max_new_tokens": 32, "masks": ["half"], "short_warm_up": True}


def sdar(
    vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, feed_forward: int, *, tied: bool
) -> dict[str, Any]:
    """Config fields of an SDAR target; the vocabulary holds at least the demo tokenizer's 2048 ids."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": feed_forward,
        "tie_word_embeddings": tied,
    }


RANDOM = {
    "tiny": sdar(2048, 64, 2, 4, 2, 16, 96, tied=True),
    "200m": sdar(32000, 1024, 12, 16, 8, 64, 3072, tied=False),
    "1.7b": sdar(151936, 2048, 28, 16, 8, 128, 6144, tied=True),  # the shape of SDAR-1.7B
}


@dataclass(frozen=True)
class Condition:
    """How prompts are decoded: up to a stop id or at a fixed length, and the temperature."""

    ignore_eos: bool
    temperature: float

    @property
    def name(self) -> str:
        return f"{'fixed length' if self.ignore_eos else 'to EOS'}, T={self.temperature:g}"


@dataclass(frozen=True)
class Engine:
    """An open engine."""

    name: str
    precision: str
    session: TargetSession
    runtime: Runtime


@dataclass(frozen=True)
class Run:
    """One prompt decoded once."""

    token_ids: list[int]
    seconds: float
    passes: int
    accepted: int
    commits: int
    exact: bool | None
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """A way to decode. `run` takes the prompt's number; `budget` is None for the plain loop."""

    engine: str
    label: str
    budget: int | None
    run: Callable[[int, Condition], Run]


@dataclass
class Reference:
    """What an engine's draft-free decoding of one prompt gave, untimed."""

    run: Run
    trajectory: Trajectory


def say(text: str) -> None:
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


# Engines


def choices(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """(backend, precision) of everything that this processor computes in and that was asked for."""
    for backend in args.backends:
        for precision in backends.precisions(backend):
            if not args.precisions or precision in args.precisions:
                yield backend, precision


def open_engines(bundle: Bundle, args: argparse.Namespace, *, probe: bool) -> Iterator[tuple[Engine, str]]:
    """The engines that the bundle's graphs allow, and the roles of those graphs; engine records stay as they are."""
    manifest = bundle.manifest
    for backend, precision in choices(args):
        inputs = EngineInputs(
            bundle_id=manifest.bundle_id,
            backend=backend,
            provider=backends.choose_provider(backend, None),
            layout="split",
            precision=precision,
            threads=args.threads,
            budgets=manifest.speculation.budgets,
            requests=1,
            targets=(),
            portable=(),
            strip=False,
            versions=backends.versions(backend),
        )
        try:
            role = bundle.target_role(inputs)
        except SpotDeployError:
            continue  # the bundle has no graph of this precision
        say(f"opening {backend} {precision}" + (" and probing it" if probe else ""))
        record = EngineRecord(inputs, [], {"strict": False, "states": 1}, None, None, {}, {}, "")
        session = bundle.open_target(record)
        if probe:
            found = verification.invariance(bundle, session, inputs.budgets, inputs.requests)
            record = replace(record, probe=found)
        runtime = Runtime.from_bundle(bundle, record, target=session)
        yield Engine(f"{backend} {precision}", precision, session, runtime), role


# Random targets


def random_weights(shapes: Mapping[str, tuple[int, ...]]) -> Callable[[str], torch.Tensor]:
    """Random float32 tensors by name. Vectors are norms: all ones."""
    generator = torch.Generator().manual_seed(0)

    def tensor(name: str) -> torch.Tensor:
        shape = shapes[name]
        return torch.randn(shape, generator=generator) * 0.02 if len(shape) > 1 else torch.ones(shape)

    return tensor


def write_weights(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    """A safetensors file of random weights, one tensor in memory at a time."""
    return stream_weights(shapes, dict.fromkeys(shapes, torch.float32), random_weights(shapes), path)


def write_settings(folder: Path, size: str, width: int) -> Checkpoint:
    """Everything of a checkpoint but the weights, with the demo's tokenizer."""
    config = json.loads((DEMO / "target" / "config.json").read_text(encoding="utf-8"))
    config |= RANDOM[size] | {"block_size": width, "max_position_embeddings": RANDOM_POSITIONS}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copyfile(DEMO / "target" / name, folder / name)
    write_json(folder / "config.json", config)
    return open_checkpoint(folder)


def write_checkpoint(folder: Path, size: str, width: int) -> Checkpoint:
    """A whole random checkpoint."""
    checkpoint = write_settings(folder, size, width)
    sources = checkpoint.family.sources(checkpoint.spec)
    write_weights(folder / "model.safetensors", {sources[n].names[0]: s for n, s in Decoder.shapes(checkpoint.spec)})
    return checkpoint


def write_graph(folder: Path, checkpoint: Checkpoint) -> Path:
    """The target graph over streamed weights, traced without them."""
    shapes = dict(Decoder.shapes(checkpoint.spec))
    offsets = write_weights(folder / WEIGHTS, shapes)
    if checkpoint.spec.tied_head:
        offsets["head.weight"] = offsets["embed.weight"]
    shape, width = checkpoint.decoding.shape, checkpoint.decoding.block_width
    model = trace_target(checkpoint.spec, checkpoint.banned, "split", shape, width)
    save_graph(model, folder / "target.onnx", external=offsets, prefix="decoder.")
    return folder / "target.onnx"


# Decoding


def oracle_bound(
    curve: Mapping[str, Any], references: Sequence[Reference], budget: int, condition: Condition
) -> tuple[float, float]:
    """The bound of a free joint oracle, and the draft-free seconds that the curve charges."""
    plain = oracle = 0.0
    for number, reference in enumerate(references):
        trajectory = reference.trajectory
        noise = Noise(number) if condition.temperature else None
        rounds = trajectory.rounds(OracleDrafter(trajectory.lookup, ORACLE_TOP), budget, noise)
        openings = pass_seconds(curve, 1) + (len(trajectory.blocks) - 1) * curve["opening"]["median"]
        plain += openings + (trajectory.commits - len(trajectory.blocks)) * pass_seconds(curve, 1)
        # An oracle knows which of its drafts would fail and leaves them out.
        oracle += openings + sum(pass_seconds(curve, 1 + r.accepted) for r in rounds)
    return plain / oracle, plain


def engine_methods(
    engine: Engine,
    prompts: Sequence[Any],
    budgets: Sequence[int],
    options: DecodeOptions,
    references: dict[str, list[Reference]],
    *,
    oracle: bool,
) -> list[Method]:
    """Draft-free, SPOT where there is an order model, and the joint oracle if wanted."""

    def method(label: str, budget: int) -> Method:
        def run(number: int, condition: Condition) -> Run:
            drafter = None
            if label.startswith("oracle"):
                drafter = OracleDrafter(references[engine.name][number].trajectory.lookup, ORACLE_TOP)
            return generate(engine, prompts, number, condition, replace(options, budget=budget), drafter=drafter)

        return Method(engine.name, label, budget, run)

    drafted = [b for b in budgets if b]
    methods = [method("draft-free", 0)]
    if engine.runtime.order_model is not None:
        methods += [method(f"SPOT D{b}", b) for b in drafted]
    return methods + ([method(f"oracle D{b}", b) for b in drafted] if oracle else [])


def generate(
    engine: Engine, prompts: Sequence[Any], number: int, condition: Condition, options: DecodeOptions, **more: Any
) -> Run:
    options = replace(options, seed=number, ignore_eos=condition.ignore_eos, temperature=condition.temperature)
    result = engine.runtime.generate(prompts[number], options, **more)
    return Run(
        result.token_ids, result.seconds, result.nfe, result.accepted, result.commits, result.exact, result.phases
    )


class PlainLoop:
    """Draft-free decoding as one would write it with transformers, at temperature 0.

    Finished blocks are in the cache; each pass computes the whole current block and commits the most probable token of
    the most confident position. (Probabilities in float64: in float32 many are 1. The ids banned are our engines'.)
    """

    def __init__(self, checkpoint: Checkpoint, tensors: dict[str, torch.Tensor], dtype: torch.dtype):
        self.decoding = checkpoint.decoding
        model: Any = load_native(checkpoint, tensors)
        model.set_attn_implementation("sdpa")  # the default of from_pretrained
        self.model, self.dtype = model.to(dtype), dtype
        self.ban = torch.where(checkpoint.banned, -torch.inf, 0.0)
        # transformers 5 renames the argument.
        renamed = "cache" in inspect.signature(model.forward).parameters
        self.cache_name = "cache" if renamed else "past_key_values"

    @torch.inference_mode()
    def run(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        ignore_eos: bool,
        check: Callable[[int, Commit, torch.Tensor, torch.Tensor], None] | None = None,
    ) -> Run:
        """Decode; `check` is told every commit, with the masked positions and their logits."""
        from transformers import DynamicCache

        began, decoding = time.perf_counter(), self.decoding
        cache: Any = DynamicCache()
        width, passes = decoding.block_width, 0
        blocks = decoding.blocks(len(prompt), max_new_tokens).stop
        sequence = torch.full((blocks * width,), decoding.mask_id)
        sequence[: len(prompt)] = torch.tensor(prompt)
        first = len(prompt) // width
        if first:
            self._forward(sequence[: first * width], 0, cache, torch.from_numpy(block_causal(first * width, width)))
        commits = 0
        for block in range(first, blocks):
            start = block * width
            tokens = sequence[start : start + width]  # a view
            while len(masked := (tokens == decoding.mask_id).nonzero()[:, 0]):
                see_all = torch.zeros(width, start + width)
                logits = self._forward(tokens, start, cache, see_all)[masked].float() + self.ban
                for layer in cache.layers:  # crop() means different things in different versions
                    layer.keys, layer.values = layer.keys[:, :, :start], layer.values[:, :, :start]
                best, ids = logits.double().softmax(-1).max(-1)
                chosen = int(best.argmax())
                commit = Commit(int(masked[chosen]), int(ids[chosen]))
                if check is not None:
                    check(commits, commit, masked, logits)
                tokens[commit.position] = commit.token
                commits, passes = commits + 1, passes + 1
            generated = sequence[max(start, len(prompt)) : start + width].tolist()
            if block == blocks - 1 or (not ignore_eos and set(generated) & set(decoding.stop_ids)):
                break
            self._forward(tokens, start, cache, torch.zeros(width, start + width))  # store
            passes += 1
        found = sequence[len(prompt) :][:max_new_tokens].tolist()
        ends = [i for i, t in enumerate(found) if t == decoding.mask_id or (not ignore_eos and t in decoding.stop_ids)]
        return Run(found[: ends[0]] if ends else found, time.perf_counter() - began, passes, 0, commits, None)

    def _forward(self, tokens: torch.Tensor, start: int, cache: Any, mask: torch.Tensor) -> torch.Tensor:
        output = self.model(
            input_ids=tokens[None],
            attention_mask=mask[None, None].to(self.dtype),
            position_ids=torch.arange(start, start + len(tokens))[None],
            use_cache=True,
            **{self.cache_name: cache},
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def compare(self, prompt: Sequence[int], max_new_tokens: int, ignore_eos: bool, wanted: Trajectory) -> Any:
        """First commit that differs from a trajectory, and how clear it was here, in log-odds; None: all equal."""
        steps = [step.commit for block in wanted.blocks for step in block]
        found: list[dict[str, Any]] = []

        def check(index: int, commit: Commit, masked: torch.Tensor, logits: torch.Tensor) -> None:
            other = steps[index] if index < len(steps) else None
            if found or commit == other:
                return
            margin = None
            if other is not None:
                odds = logits.double().log_softmax(-1).exp().logit()
                row = {int(p): m for m, p in enumerate(masked)}
                margin = float(odds[row[commit.position], commit.token] - odds[row[other.position], other.token])
                margin = margin if np.isfinite(margin) else None
            near = margin is not None and abs(margin) < NEAR_TIE
            found.append({"commit": index, "margin": margin, "near_tie": near})

        self.run(prompt, max_new_tokens, ignore_eos, check)
        return found[0] if found else None


def has_bf16() -> bool:
    """Whether the processor multiplies bfloat16 itself; elsewhere torch emulates it, slower than float32."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "amx_bf16" in text or "avx512_bf16" in text


def plain_loops(
    checkpoint: Checkpoint, ids: Sequence[Sequence[int]], max_new_tokens: int
) -> tuple[list[Method], dict[str, PlainLoop]]:
    """The plain loop in float32, and in bfloat16 where the processor has it."""
    tensors, methods, loops = checkpoint.tensors(), [], {}
    for name, dtype in {"f32": torch.float32, "bf16": torch.bfloat16}.items():
        if dtype is torch.bfloat16 and not has_bf16():
            continue
        loop = loops[f"torch {name}"] = PlainLoop(checkpoint, tensors, dtype)

        def run(number: int, condition: Condition, loop: PlainLoop = loop) -> Run:
            return loop.run(ids[number], max_new_tokens, condition.ignore_eos)

        methods.append(Method(f"torch {name}", "plain loop", None, run))
    return methods, loops


def time_methods(
    methods: Sequence[Method], prompts: int, condition: Condition, references: dict[str, list[Reference]], repeats: int
) -> list[dict[str, Any]]:
    """Let the methods decode all prompts in turn, `repeats` times."""
    runs: list[list[list[Run]]] = [[[] for _ in range(repeats)] for _ in methods]
    for method in methods:
        method.run(0, condition)
    gc.collect()
    for repeat in range(repeats):
        for number in range(prompts):
            for index, method in enumerate(methods):
                runs[index][repeat].append(method.run(number, condition))
    rows = []
    seconds = [[sum(run.seconds for run in repeat) for repeat in of_method] for of_method in runs]
    speeds = [
        [sum(len(run.token_ids) for run in repeat) / s for repeat, s in zip(of_method, times, strict=True)]
        for of_method, times in zip(runs, seconds, strict=True)
    ]
    plain = next((i for i, m in enumerate(methods) if m.budget is None), None)  # in float32
    for index, method in enumerate(methods):
        last, wanted = runs[index][-1], references.get(method.engine, [])
        tokens = sum(len(run.token_ids) for run in last)
        row: dict[str, Any] = {
            "engine": method.engine,
            "method": method.label,
            "budget": method.budget,
            "tokens": tokens,
            "seconds": spread(seconds[index]),
            "tokens_per_second": spread(speeds[index]),
            **{name: sum(getattr(run, name) for run in last) for name in ("passes", "accepted", "commits")},
        }
        if plain is not None:
            row["versus_plain_loop"] = spread([a / b for a, b in zip(speeds[index], speeds[plain], strict=True)])
        if method.budget is not None:
            base = next(i for i, m in enumerate(methods) if (m.engine, m.budget) == (method.engine, 0))
            whole = sum(seconds[index])
            row |= {
                "speedup": spread([a / b for a, b in zip(seconds[base], seconds[index], strict=True)]),
                "identical": all(
                    run.token_ids == reference.run.token_ids
                    for repeat in runs[index]
                    for run, reference in zip(repeat, wanted, strict=True)
                ),
                "exact": all(run.exact for run in last),
                "shares": {
                    phase: sum(run.phases[phase] for repeat in runs[index] for run in repeat) / whole
                    for phase in last[0].phases
                },
            }
        rows.append(row)
    return rows


def decode_part(
    methods: list[Method],
    engines: Sequence[Engine],
    loops: Mapping[str, PlainLoop],
    prompts: Sequence[Any],
    condition: Condition,
    curves: Mapping[str, Any],
    references: dict[str, list[Reference]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """One condition: references, timings, comparisons, bounds."""
    options = DecodeOptions(max_new_tokens=args.max_new_tokens)
    for engine in engines:
        references[engine.name] = []
        for number in range(len(prompts)):
            trajectory = Trajectory()
            run = generate(engine, prompts, number, condition, replace(options, budget=0), observe=trajectory)
            references[engine.name].append(Reference(run, trajectory))
    methods = [m for m in methods if m.budget is not None or not condition.temperature]
    rows = time_methods(methods, len(prompts), condition, references, args.repeats)
    first = next((e for e in engines if e.precision == "f32"), engines[0])
    for row in rows:
        curve, budget = curves.get(row["engine"]), row["budget"]
        if curve is not None and budget is not None and str(budget + 1) in next(iter(curve["curves"].values())):
            bound, charged = oracle_bound(curve, references[row["engine"]], budget, condition)
            row["charged_draft_free_seconds"] = charged
            if budget:
                row |= {"oracle_bound": bound, "share_of_bound": row["speedup"]["median"] / bound}
        if row["engine"] in loops:
            loop = loops[row["engine"]]
            ids = [first.runtime.prompt_ids(p).tolist() for p in prompts]
            row["compared_with"] = first.name
            row["differences"] = [
                loop.compare(i, args.max_new_tokens, condition.ignore_eos, reference.trajectory)
                for i, reference in zip(ids, references[first.name], strict=True)
            ]
    agreement = {
        engine.name: sum(
            a.run.token_ids == b.run.token_ids
            for a, b in zip(references[engine.name], references[first.name], strict=True)
        )
        for engine in engines
    }
    return {
        "condition": condition.name,
        "temperature": condition.temperature,
        "ignore_eos": condition.ignore_eos,
        "max_new_tokens": args.max_new_tokens,
        "prompts": len(prompts),
        "repeats": args.repeats,
        "prompts_equal_to": {"engine": first.name, "by_engine": agreement},
        "rows": rows,
    }


# Printing


def figure(value: Mapping[str, float], digits: int) -> str:
    return f"{value['median']:.{digits}f} ({value['min']:.{digits}f}-{value['max']:.{digits}f})"


def print_curves(console: Console, name: str, curves: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title=f"{name}: cost of a pass, c(S) = t(S) / t(1)", box=None, header_style="bold")
    gains = sorted({int(b) for c in curves for b in c["ceiling"]})
    for column in ("engine", "L", "masked", "t(1) ms", "opening ms"):
        table.add_column(column, justify="left" if column in ("engine", "masked") else "right")
    for column in (*(f"c({s})" for s in SHOWN), *(f"ceiling D{b}" for b in gains)):
        table.add_column(column, justify="right")
    for c in curves:
        for kind, points in c["curves"].items():
            values = [f"{points[str(s)]['c']:.2f}" if str(s) in points else "-" for s in SHOWN]
            main = kind == next(iter(c["curves"]))
            tops = [f"{c['ceiling'][str(b)]:.2f}x" if main and str(b) in c["ceiling"] else "" for b in gains]
            milliseconds = [f"{1e3 * v['median']:.2f}" for v in (points["1"]["seconds"], c["opening"])]
            table.add_row(c["engine"], str(c["width"]), kind, *milliseconds, *values, *tops)
    console.print(table)


def print_decode(console: Console, name: str, part: Mapping[str, Any]) -> None:
    table = Table(
        title=f"{name}: {part['condition']}, {part['prompts']} prompts, median (min-max) of {part['repeats']}",
        box=None,
        header_style="bold",
    )
    columns = (
        "engine",
        "decoding",
        "tokens/s",
        "x draft-free",
        "x torch",
        "passes",
        "accepted",
        "target %",
        "draft %",
        "host %",
    )
    for column in (*columns, "oracle bound", "of bound", "same tokens"):
        table.add_column(column, justify="left" if column in columns[:2] else "right")
    for row in part["rows"]:
        shares = row.get("shares", {})
        parts = [f"{100 * shares[p]:.0f}" if shares else "-" for p in ("target", "draft", "host")]
        bound = [f"{row['oracle_bound']:.2f}x", f"{100 * row['share_of_bound']:.0f}%"] if "oracle_bound" in row else []
        if "identical" in row:
            same = "yes" if row["identical"] else "NO"
        else:
            odd = [d for d in row["differences"] if d is not None]
            same = f"{part['prompts'] - len(odd)}/{part['prompts']}"
            if odd:
                same += f", {sum(d['near_tie'] for d in odd)} near ties"
        table.add_row(
            row["engine"],
            row["method"],
            figure(row["tokens_per_second"], 1),
            figure(row["speedup"], 2) if row.get("budget") else "-",
            f"{row['versus_plain_loop']['median']:.2f}" if "versus_plain_loop" in row else "-",
            str(row["passes"]),
            str(row["accepted"]),
            *parts,
            *(bound or ("-", "-")),
            same,
        )
    console.print(table)


# The whole


class Report:
    """The results file, written anew after every part."""

    def __init__(self, args: argparse.Namespace):
        self.path = args.output
        self.document: dict[str, Any] = {
            "format": "spot-deploy-engine-benchmark",
            "schema_version": 1,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "commit": _git("rev-parse", "HEAD"),
            "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
            "threads": args.threads,
            "machine": {
                "processor": backends.processor(),
                "cores": backends.default_threads(),
                "memory_bytes": _memory(),
                "system": f"{platform.system()} {platform.release()}",
            },
            "versions": _versions(args.backends),
            "targets": [],
        }

    def write(self) -> None:
        # Linux counts in KiB.
        self.document["peak_memory_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        write_json(self.path, self.document)


def _git(*arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(DEMO.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _memory() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    return 1024 * int(text.split("MemTotal:")[1].split()[0])


def _versions(wanted: Sequence[str]) -> dict[str, str]:
    import transformers

    found = {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__}
    found["transformers"] = transformers.__version__
    for backend in wanted:
        found |= {name: v for name, v in backends.versions(backend).items() if name != "processor"}
    return found


def measure_bundle(
    report: Report, console: Console, path: Path, checkpoint: Path | None, args: argparse.Namespace, random: str = ""
) -> None:
    """All parts on one bundle, or on one of a random target of that size. All of its engines are open at once, so that
    they can take turns."""
    bundle = open_bundle(path)
    manifest, decoding = bundle.manifest, bundle.manifest.decoding
    budgets = [b for b in manifest.speculation.budgets if b == 0 or args.budgets is None or b in args.budgets]
    entry: dict[str, Any] = {
        "name": f"random {random}" if random else path.resolve().name,
        "bundle_id": manifest.bundle_id,
        "block_width": decoding.block_width,
        "weights_bytes": sum(f.bytes for f in manifest.files if f.path == WEIGHTS),
        "engines": {},
        "curves": [],
        "decode": [],
    }
    report.document["targets"].append(entry)
    engines = []
    for engine, role in open_engines(bundle, args, probe=not random):
        budget = None if random else engine.runtime.exact_budget
        entry["engines"][engine.name] = {"graph": manifest.graph(role)[0], "probed_exact_budget": budget}
        engines.append(engine)
    if not engines:
        raise SystemExit("no engine fits --backends and --precisions")
    report.write()
    own: dict[str, Any] = {}
    if "curves" in args.parts:
        prefix = args.prefix or decoding.buckets[len(decoding.buckets) // 2]
        for engine in engines:
            for width in args.widths if random else [decoding.block_width]:
                say(f"{entry['name']}: curves of {engine.name}, width {width}")
                curve = cost_curves(engine.session, decoding, width, prefix, budgets, curve_options(args))
                entry["curves"].append({"engine": engine.name, **curve})
                if width == decoding.block_width:
                    own[engine.name] = curve
                report.write()
        print_curves(console, entry["name"], entry["curves"])
    if not {"decode", "torch"} & set(args.parts):
        return
    prompts: list[Any]
    if random:
        rng = np.random.default_rng(1)
        prompts = [
            rng.integers(0, min(decoding.reserved), 2 * decoding.block_width).tolist() for _ in range(args.limit)
        ]
    else:
        texts = [p.text for p in read_prompts(args.prompts, args.limit)]
        prompts = [[{"role": "user", "content": t}] if args.chat else t for t in texts]
    options, references = DecodeOptions(max_new_tokens=args.max_new_tokens), dict[str, list[Reference]]()
    methods: list[Method] = []
    loops: dict[str, PlainLoop] = {}
    if "decode" in args.parts:
        for engine in engines:
            methods += engine_methods(engine, prompts, budgets, options, references, oracle=bool(random))
    if "torch" in args.parts:
        if checkpoint is None:
            raise SystemExit("--parts torch needs --checkpoint")
        ids = [engines[0].runtime.prompt_ids(p).tolist() for p in prompts]
        more, loops = plain_loops(open_checkpoint(checkpoint), ids, args.max_new_tokens)
        methods += more
    modes = ["fixed"] if random else args.modes
    for condition in [Condition(mode == "fixed", t) for t in args.temperatures for mode in modes]:
        if not any(m.budget is not None for m in methods) and condition.temperature:
            continue  # the plain loop alone knows temperature 0 only
        say(f"{entry['name']}: decoding, {condition.name}")
        part = decode_part(methods, engines, loops, prompts, condition, own, references, args)
        entry["decode"].append(part)
        report.write()
        print_decode(console, entry["name"], part)


def measure_random_curves(report: Report, console: Console, folder: Path, args: argparse.Namespace, size: str) -> None:
    """Curves of a random target, one engine in memory at a time, without a bundle."""
    say(f"random {size}: writing weights and tracing")
    checkpoint = write_settings(folder, size, max(args.widths))
    graph = write_graph(folder, checkpoint)
    decoding = checkpoint.decoding
    entry: dict[str, Any] = {
        "name": f"random {size}",
        "weights_bytes": (folder / WEIGHTS).stat().st_size,
        "engines": {},
        "curves": [],
        "decode": [],
    }
    report.document["targets"].append(entry)
    budgets = args.budgets or ExportOptions().budgets
    prefix = args.prefix or decoding.buckets[len(decoding.buckets) // 2]
    for backend, precision in choices(args):
        if backends.graph_precision(backend, precision) != "f32":
            continue  # no other graph is written here
        name, signature = f"{backend} {precision}", decoding.shape.signature()
        say(f"random {size}: opening {name}")
        session = backends.open_target(backend, graph, signature, threads=args.threads, precision=precision)
        entry["engines"][name] = {"graph": graph.name, "probed_exact_budget": None}
        for width in args.widths:
            say(f"random {size}: curves of {name}, width {width}")
            curve = cost_curves(session, decoding, width, prefix, budgets, curve_options(args))
            entry["curves"].append({"engine": name, **curve})
            report.write()
        del session
        gc.collect()
    print_curves(console, entry["name"], entry["curves"])


def curve_options(args: argparse.Namespace) -> CurveOptions:
    return CurveOptions(args.states, args.masks, args.curve_repeats, args.curve_seconds, args.short_warm_up)


def _list(kind: Callable[[str], Any], allowed: Sequence[Any] = ()) -> Callable[[str], list[Any]]:
    """An argument type: comma-separated values."""

    def parse(text: str) -> list[Any]:
        values = [kind(part) for part in text.split(",")]
        if allowed and not set(values) <= set(allowed):
            raise argparse.ArgumentTypeError(f"{text}: choose from {', '.join(map(str, allowed))}")
        return values

    return parse


def parse_arguments() -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("bundles", type=Path, nargs="*", help="bundles to measure")
    parser.add_argument("--checkpoint", type=Path, nargs="*", default=[], help="of each bundle, for the part torch")
    parser.add_argument("--random", type=_list(str, RANDOM), default=[], metavar="SIZE,...", help=", ".join(RANDOM))
    parser.add_argument("-o", "--output", type=Path, required=True, help="results file (JSON)")
    parser.add_argument("--work", type=Path, help="where temporary weights go (1.7b: 7 GB)")
    parser.add_argument("--parts", type=_list(str, PARTS), default=list(PARTS), metavar="PART,...")
    parser.add_argument(
        "--backends", type=_list(str, backends.CPU_BACKENDS), default=list(backends.CPU_BACKENDS), metavar="NAME,..."
    )
    parser.add_argument("--precisions", type=_list(str, GRAPH_PRECISIONS), default=[], help="default: all there are")
    parser.add_argument("--threads", type=int, default=backends.default_threads())
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument("--prompts", type=Path, default=DEMO / "prompts.jsonl", help="JSON lines")
    decoding.add_argument("--chat", action="store_true", help="put prompts into the chat template")
    decoding.add_argument("--limit", type=int, default=6, help="prompts")
    decoding.add_argument("--repeats", type=int, default=3)
    decoding.add_argument("--budgets", type=_list(int), help="of the manifest's; default: all")
    decoding.add_argument("--temperatures", type=_list(float), default=[0.0], metavar="T,...")
    decoding.add_argument("--modes", type=_list(str, ("eos", "fixed")), default=["eos", "fixed"])
    decoding.add_argument("--max-new-tokens", type=int, default=128)
    decoding.add_argument("--width", type=int, default=32, help="block width of a random target that is decoded")
    decoding.add_argument("--order-model", type=Path, default=DEMO / "order-model", help="of a random target")
    curves = parser.add_argument_group("cost curves")
    curves.add_argument("--states", type=_list(int), default=list(range(1, 22)), metavar="S,...")
    curves.add_argument(
        "--random-states", type=_list(int), default=[1, 2, 3, 4, 6, 9, 13, 17, 21], metavar="S,...", help="if random"
    )
    curves.add_argument("--widths", type=_list(int), default=[4, 16, 32], help="of random targets; bundles: their own")
    curves.add_argument("--masks", type=_list(str, MASKS), default=list(MASKS))
    curves.add_argument("--prefix", type=int, help="prefix bucket; default: the middle one")
    curves.add_argument("--curve-repeats", type=int, default=15)
    curves.add_argument("--curve-seconds", type=float, default=60, help="begin no further repeat of a curve after this")
    args = parser.parse_args()
    if not args.bundles and not args.random:
        parser.error("give bundles, --random or both")
    args.short_warm_up = False
    return args


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    console = Console(width=170)
    report = Report(args)
    for index, path in enumerate(args.bundles):
        checkpoint = args.checkpoint[index] if index < len(args.checkpoint) else None
        measure_bundle(report, console, path, checkpoint, args)
    random_args = argparse.Namespace(**vars(args) | RANDOM_DEFAULTS | {"states": args.random_states})
    for size in args.random:
        with tempfile.TemporaryDirectory(dir=args.work, prefix="benchmark-") as name:
            folder = Path(name)
            if size == "1.7b" or args.parts == ["curves"]:
                measure_random_curves(report, console, folder, random_args, size)
            else:
                write_checkpoint(folder, size, args.width)
                bundle = folder / "random.spot"
                options = ExportOptions(parity="none")
                export_bundle(folder, bundle, order_model=args.order_model, options=options, say=say)
                gc.collect()
                measure_bundle(report, console, bundle, folder, random_args, size)
    say(f"results: {args.output}")


if __name__ == "__main__":
    main()
