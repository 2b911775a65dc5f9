"""The measuring of `bench`: one JSON line per decoded prompt, written as soon as it is known, so that it can go on.

A prompt is decoded draft-free once at every temperature and seed, past the end of text, at the longest length. What any
exact method would need at any budget follows from that (see training.replay), block by block; so shorter lengths, and
stopping at the end of text, are parts of one line. Only rejection sampling, the greedy verifier and times need decoding
of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from spot_deploy import __version__
from spot_deploy.bench.config import EXACT, METHODS, ORACLES, SETS, SPOT, BenchConfig
from spot_deploy.bench.grading import grade
from spot_deploy.engines import backends
from spot_deploy.engines.contracts import Array, OrderSession
from spot_deploy.engines.errors import SpotDeployError, usage_error
from spot_deploy.runtime.api import Runtime
from spot_deploy.runtime.decode import DecodeOptions
from spot_deploy.runtime.drafters import Drafter, OracleDrafter, Round, SpotDrafter, TokenOracle
from spot_deploy.runtime.noise import Noise
from spot_deploy.runtime.rivals import ConfidenceTree, DraftGraph, FreeChain, Guess
from spot_deploy.runtime.tree import Node
from spot_deploy.training.draft_graph import choose_graph, count_formulas
from spot_deploy.training.prompts import Prompt, read_prompts
from spot_deploy.training.replay import Trajectory

FORMAT = "spot-deploy-bench 1"
AHEAD = (1, 2, 4, 8, 16)  # commits over which stale coverage is taken,
TOPS = (1, 2, 4, 8, 32)  # and candidates
BINS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 1.0)  # of node mass
Say = Callable[[int, str], None]


@dataclass(frozen=True)
class Cell:
    """What one line is about."""

    temperature: float
    seed: int
    prompt: int


def load_prompts(config: BenchConfig) -> list[tuple[int, Prompt]]:
    """The prompts to measure, numbered among those of the wanted kinds: `per_kind` of each, in order.

    Raises:
        SpotDeployError: there is no such file, set or kind (exit code 2).
    """
    path = Path(config.prompts)
    if not path.suffix:
        sets = resources.files(__package__).joinpath(SETS)
        names = sorted(entry.name.removesuffix(".jsonl") for entry in sets.iterdir() if entry.name.endswith(".jsonl"))
        if config.prompts not in names:
            raise usage_error(
                "prompts", f"there is no set {config.prompts!r}", wanted=", ".join(names), fix="or give a .jsonl file"
            )
        with resources.as_file(sets.joinpath(f"{config.prompts}.jsonl")) as found:
            prompts = read_prompts(found, kinds=config.kinds)
    else:
        prompts = read_prompts(path, kinds=config.kinds)
    taken: Counter[str] = Counter()
    chosen = []
    for number, prompt in enumerate(prompts):
        if taken[prompt.kind] < config.per_kind:
            taken[prompt.kind] += 1
            chosen.append((number, prompt))
    return chosen


class Remembering:
    """An order model that is run once for every hypothetical prefix: methods and budgets share most of them."""

    def __init__(self, session: OrderSession):
        self._session = session
        self._known: dict[bytes, Array] = {}

    def run(self, features: Array, state_id: Array, depth: Array, masked: Array) -> Array:
        """As OrderSession has it."""
        rows = zip(features, state_id, depth, strict=True)
        keys = [hashlib.blake2b(b"".join(map(np.ndarray.tobytes, map(np.asarray, row)))).digest() for row in rows]
        new = list({key: n for n, key in enumerate(keys) if key not in self._known}.values())
        if new:
            found = self._session.run(features[new], state_id[new], depth[new], masked[new])
            self._known |= {keys[n]: log_q for n, log_q in zip(new, found, strict=True)}
        return np.stack([self._known[key] for key in keys])


class Bench:
    """A grid of measurements on an open runtime.

    Args:
        others: order models of variants, by name.
    """

    def __init__(self, config: BenchConfig, runtime: Runtime, others: Mapping[str, OrderSession] | None = None):
        self.config, self.runtime, self._others = config, runtime, others or {}
        self._remembered: dict[str, Remembering] = {}  # of the present prompt, by variant
        self.prompts = load_prompts(config)
        if not runtime.decoding.exact_cache and len(config.lengths) > 1:
            raise usage_error(
                "bench-lengths",
                "with a frozen cache a shorter generation is no part of a longer one",
                seen=f"lengths {config.lengths}",
                fix="measure one length at a time",
            )
        for number, prompt in self.prompts:
            self._require_room(number, prompt)

    def _require_room(self, number: int, prompt: Prompt) -> None:
        """Refuse what would end a long run in its middle."""
        decoding, length = self.runtime.decoding, self.config.lengths[-1]
        tokens = len(self.runtime.prompt_ids(self.given(prompt)))
        if decoding.positions(tokens, length) > decoding.max_positions:
            raise usage_error(
                "capacity",
                f"prompt {number} and {length} new tokens do not fit the target",
                seen=f"{tokens} prompt tokens ({prompt.kind}: {prompt.text[:40]!r} ...)",
                wanted=f"at most {decoding.max_positions} positions in all",
                fix="leave out that kind, or shorten lengths",
            )

    def header(self) -> dict[str, Any]:
        """What results depend on; a file is gone on with only where all of it is the same."""
        config = json.loads(json.dumps(asdict(self.config), default=str))
        return {
            "record": "run",
            "format": FORMAT,
            "version": __version__,
            "config": config | {"bundle": self.config.bundle.name},
            "prompts_sha256": hashlib.sha256(repr(self.prompts).encode()).hexdigest(),
            "bundle_id": self.runtime.bundle_id,
            "machine": {"processor": backends.processor(), "cores": backends.default_threads()},
            "versions": backends.versions(self.config.backend),
            "precision": self.runtime.precision,
            "block_width": self.runtime.decoding.block_width,
            "attention": self.runtime.decoding.attention,
            "given_start": self.runtime.decoding.given_start,
        }

    def run(self, output: Path, say: Say = lambda done, note: None) -> None:
        """Measure all that `output` does not hold yet, and append it.

        Raises:
            SpotDeployError: the file is of another configuration, bundle or machine, or no such file at all.
        """
        cells = list(self.cells())
        timed = list(self.timings())
        there = read_results(output, self.header())
        known = {_key(line) for line in there}
        with output.open("a", encoding="utf-8") as file:

            def write(line: Mapping[str, Any]) -> None:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                file.flush()

            if not there:
                write(self.header())
            for done, (cell, prompt) in enumerate(cells):
                if ("prompt", *asdict(cell).values()) not in known:
                    write(self.measure(cell, prompt))
                say(done + 1, prompt.kind)
            for done, (cell, prompt) in enumerate(timed):
                if ("timing", *asdict(cell).values()) not in known:
                    write(self.time(cell, prompt))
                say(len(cells) + done + 1, f"timing {prompt.kind}")

    @property
    def total(self) -> int:
        """Lines to write."""
        return len(list(self.cells())) + len(list(self.timings()))

    def cells(self) -> Iterator[tuple[Cell, Prompt]]:
        """At temperature 0 all seeds are one."""
        for number, prompt in self.prompts:
            for temperature in self.config.temperatures:
                for seed in self.config.seeds if temperature else self.config.seeds[:1]:
                    yield Cell(temperature, seed, number), prompt

    def timings(self) -> Iterator[tuple[Cell, Prompt]]:
        taken: Counter[str] = Counter()
        for number, prompt in self.prompts:
            if taken[prompt.kind] < self.config.timing.prompts:
                taken[prompt.kind] += 1
                for temperature in self.config.temperatures:
                    yield Cell(temperature, self.config.seeds[0], number), prompt

    def options(self, cell: Cell) -> DecodeOptions:
        """Every prompt has noise of its own."""
        return self.runtime.resolve(
            DecodeOptions(
                temperature=cell.temperature,
                seed=cell.seed,
                sample=cell.prompt,
                max_new_tokens=self.config.lengths[-1],
                ignore_eos=True,
            )
        )

    def given(self, prompt: Prompt) -> Any:
        return [{"role": "user", "content": prompt.text}] if self.config.chat else prompt.text

    def measure(self, cell: Cell, prompt: Prompt) -> dict[str, Any]:
        """The line of one prompt."""
        options = self.options(cell)
        trajectory = Trajectory()
        self._remembered.clear()
        decoded = self.runtime.generate(self.given(prompt), options, budget=0, observe=trajectory)
        noise = Noise(cell.seed, cell.prompt) if cell.temperature else None
        ids = decoded.token_ids
        stop = next((n for n, i in enumerate(ids) if i in self.runtime.decoding.stop_ids), None)
        right = {}
        for length in self.config.lengths:
            text = self.runtime.text.decode(ids[: length if stop is None else min(stop, length)])
            right[str(length)] = grade(text, prompt.answer, prompt.grader, run_code=self.config.run_code)
        probabilities = trajectory.committed()
        line: dict[str, Any] = {
            "record": "prompt",
            **asdict(cell),
            "kind": prompt.kind,
            "prompt_tokens": decoded.prompt_tokens,
            "commits": [len(steps) for steps in trajectory.blocks],
            "end": None if stop is None else self._blocks(decoded.prompt_tokens, stop + 1) - 1,
            "blocks": {str(n): self._blocks(decoded.prompt_tokens, n) for n in self.config.lengths},
            "right": right,
            "committed": [float(np.sum(probabilities)), len(probabilities)],
            "argmax": _argmax(trajectory),
            "coverage": _coverage(trajectory),
            "order": _order(trajectory, noise),
            "methods": [],
        }
        seen: list[tuple[float, bool]] = []
        for method, verifier, budget, gamma in self.grid(cell.temperature):
            entry = {"method": method, "verifier": verifier, "budget": budget, "gamma": gamma}
            if verifier not in EXACT:
                chosen = replace(options, verifier=verifier, budget=budget, gamma=gamma)
                found = self.runtime.generate(self.given(prompt), chosen)
                entry |= {"nfe": found.nfe, "commits": found.commits}
            else:
                entry |= self._replay(method, verifier, budget, gamma, trajectory, noise, options, seen)
            line["methods"].append(entry)
        line["reliability"] = _binned(seen)
        return line

    def grid(self, temperature: float) -> Iterator[tuple[str, str, int, float]]:
        """Method, verifier, budget and mass floor of everything to measure at a temperature."""
        config = self.config
        for budget in config.budgets:
            for method in (*config.methods, *(v.name for v in config.variants)):
                for gamma in config.gammas if method in (SPOT, "SPOT chain") else config.gammas[:1]:
                    for verifier in config.verifiers if method == SPOT and temperature else ("coupled",):
                        yield method, verifier, budget, gamma

    def _replay(
        self,
        method: str,
        verifier: str,
        budget: int,
        gamma: float,
        trajectory: Trajectory,
        noise: Noise | None,
        options: DecodeOptions,
        seen: list[tuple[float, bool]],
    ) -> dict[str, Any]:
        drafter = self.drafter(method, replace(options, gamma=gamma), trajectory)
        calibrating = method == SPOT and gamma == self.config.gammas[0] and budget == self.config.budgets[-1]

        def told(node: Node, accepted: bool) -> None:
            if calibrating and verifier == "coupled":
                seen.append((node.mass, accepted))

        rounds = trajectory.rounds(drafter, budget, noise if verifier == "coupled" else None, told)
        passes, accepted = Counter(r.block for r in rounds), Counter[int]()
        for r in rounds:
            accepted[r.block] += r.accepted
        blocks = range(len(trajectory.blocks))
        return {
            "passes": [1 + passes[b] for b in blocks],
            "accepted": [accepted[b] for b in blocks],
            "states": sum(r.states for r in rounds),
            "ended": dict(Counter(r.ended for r in rounds if r.ended)),
        }

    def drafter(self, method: str, options: DecodeOptions, trajectory: Trajectory | None) -> Drafter:
        """A method's drafter; `trajectory` is what oracles look into."""
        if oracle := ORACLES.fullmatch(method):
            assert trajectory is not None
            if oracle[1] == "joint":
                return OracleDrafter(trajectory.lookup, int(oracle[2]))
            return TokenOracle(**vars(self._spot(options, trajectory)), final=trajectory.final, top=int(oracle[2]))
        if method == "position":
            assert trajectory is not None
            return OracleDrafter(trajectory.lookup)
        rivals: dict[str, Callable[[], Drafter]] = {
            "free chain": FreeChain,
            "confidence tree": ConfidenceTree,
            "draft graph": lambda: self.graphs[options.temperature],
        }
        if method in rivals:
            return rivals[method]()
        if method in METHODS:
            return replace(self._spot(options, trajectory), chain=method == "SPOT chain")
        variant = next(v for v in self.config.variants if v.name == method)
        changes = {n: getattr(variant, n) for n in ("tau", "hedge_gate", "hedge_weights")}
        spot = self._spot(options, trajectory, variant.name if variant.name in self._others else "")
        return replace(
            spot, merge=variant.merge, chain=variant.chain, **{n: v for n, v in changes.items() if v is not None}
        )

    def _spot(self, options: DecodeOptions, trajectory: Trajectory | None, other: str = "") -> SpotDrafter:
        """SPOT with the bundle's order model or a variant's; one that remembers, but where it is timed."""
        spot = self.runtime.spot_drafter(options)
        order_model = self._others[other] if other else spot.order_model
        if trajectory is not None:
            order_model = self._remembered.setdefault(other, Remembering(order_model))
        return replace(spot, order_model=order_model)

    @cached_property
    def graphs(self) -> dict[float, DraftGraph]:
        """The draft graph of every temperature, from prompts that are not measured."""
        graph = self.config.graph
        assert graph is not None
        found = {}
        for temperature in self.config.temperatures:
            counts: Counter[Any] = Counter()
            for number, prompt in enumerate(read_prompts(graph.prompts, graph.limit)):
                trajectory = Trajectory()
                options = self.options(Cell(temperature, self.config.seeds[0], number))
                self.runtime.generate(self.given(prompt), options, budget=0, observe=trajectory)
                count_formulas(trajectory, Noise(options.seed, number) if temperature else None, counts)
            found[temperature] = choose_graph(counts, self.config.budgets[-1])
        return found

    def time(self, cell: Cell, prompt: Prompt) -> dict[str, Any]:
        """Seconds of draft-free and drafted decodes of one prompt, in turns, up to the end of text."""
        timing, options = self.config.timing, replace(self.options(cell), ignore_eos=False)
        runs: dict[tuple[str, int], Drafter | None] = {("draft-free", 0): None}
        runs |= {(m, b): self.drafter(m, options, None) for m in timing.methods for b in timing.budgets}
        seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        passes: dict[tuple[str, int], int] = {}
        tokens: list[int] | None = None
        for turn in range(timing.repeats + 1):  # the first warms up
            for (method, budget), drafter in runs.items():
                found = self.runtime.generate(self.given(prompt), options, budget=budget, drafter=drafter)
                tokens = tokens or found.token_ids
                if found.lossless and found.token_ids != tokens:
                    raise SpotDeployError(
                        "bench-unequal",
                        f"{method} at budget {budget} decoded another text than draft-free decoding",
                        seen=f"prompt {cell.prompt}, temperature {cell.temperature}, seed {cell.seed}",
                        fix="spot-deploy verify, and report this",
                    )
                passes[method, budget] = found.nfe
                if turn:
                    seconds[method, budget].append(found.seconds)
        return {
            "record": "timing",
            **asdict(cell),
            "kind": prompt.kind,
            "tokens": len(tokens or ()),
            "runs": [
                {
                    "method": method,
                    "budget": budget,
                    "passes": passes[method, budget],
                    "seconds": seconds[method, budget],
                }
                for method, budget in runs
            ],
        }

    def _blocks(self, prompt_tokens: int, length: int) -> int:
        return len(list(self.runtime.decoding.blocks(prompt_tokens, length)))


def _argmax(trajectory: Trajectory) -> list[int]:
    """[commits whose token has the largest logit at its position, all]."""
    right = total = 0
    for step in (step for steps in trajectory.blocks for step in steps):
        head = step.head
        m = int(np.flatnonzero(head.positions == step.commit.position)[0])
        best = head.ids[m][head.logits[m] == head.logits[m].max()].min()
        right += int(best == step.commit.token)
        total += 1
    return [right, total]


def _coverage(trajectory: Trajectory) -> list[list[int]]:
    """[K, t, roots after which all of the next K commits' tokens are among the t stale candidates, roots]."""
    ranks = list(trajectory.stale_ranks(max(AHEAD)))
    rows = []
    for ahead in AHEAD:
        worst = [max(found[:ahead]) for found in ranks if len(found) >= ahead]
        rows += [[ahead, top, sum(rank < top for rank in worst), len(worst)] for top in TOPS]
    return rows


def _order(trajectory: Trajectory, noise: Noise | None) -> list[list[int]]:
    """By block: [the stale most confident position commits next, its stale token is right, all]."""
    rows = []
    for steps in trajectory.blocks:
        positions = tokens = total = 0
        for n, step in enumerate(steps[:-1]):
            root, true = steps[n + 1].state, steps[n + 1].commit
            guess = Guess.of(Round(step.state, step.head, step.commit, root, 1, noise), 0)
            positions += guess.most_confident(()).position == true.position
            tokens += int(guess.tokens[guess.positions == true.position, 0][0]) == true.token
            total += 1
        rows.append([int(positions), int(tokens), total])
    return rows


def _binned(seen: Sequence[tuple[float, bool]]) -> list[list[float]]:
    """By bin of mass: [sum of masses, accepted, states]."""
    rows = [[0.0, 0, 0] for _ in BINS[1:]]
    for mass, accepted in seen:
        row = rows[min(int(np.searchsorted(BINS, mass, side="left")), len(rows)) - 1]
        row[0] += mass
        row[1] += accepted
        row[2] += 1
    return rows


def _key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return (line["record"], *(line.get(name) for name in ("temperature", "seed", "prompt")))


def read_results(path: Path, header: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """The lines of a results file; a last line that was cut short is removed from the file if `header` is given.

    Args:
        header: what the file must be of, to be gone on with.

    Raises:
        SpotDeployError: it is no results file, or of something else (exit code 2).
    """
    fix = "give another -o, or remove the file"
    if header is not None and not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8")
        whole, _, rest = text.rpartition("\n")
        lines = [json.loads(line) for line in whole.split("\n") if line]
        if not all(isinstance(line, dict) and "record" in line for line in lines):
            raise ValueError("a line is no record")
        if lines and lines[0].get("format") != FORMAT:
            raise ValueError(f"format {lines[0].get('format')!r}, not {FORMAT!r}")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise usage_error(
            "bench-results", f"{path} holds no results of bench", seen=str(error)[:200], fix=fix
        ) from error
    if header is None:
        if not lines:
            raise usage_error("bench-results", f"{path} is empty", fix="run bench first")
        return lines
    if rest:
        with path.open("r+", encoding="utf-8") as file:
            os.truncate(file.fileno(), len((whole + "\n").encode()) if whole else 0)
    differences = [name for name, value in header.items() if lines and lines[0].get(name) != value]
    if differences:
        name = differences[0]
        raise usage_error(
            "bench-results",
            f"{path} holds results of something else",
            seen=f"{name}: {str(lines[0].get(name))[:200]}",
            wanted=str(header[name])[:200],
            fix=fix,
        )
    return lines
