"""What a results file of `bench` says, as tables: the paper's, in kind (SPOT, tables 1-22)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spot_deploy.bench.config import SPOT
from spot_deploy.bench.measure import read_results

# NFE(joint oracle, t = 2) / NFE(SPOT) on SDAR-8B, by the paper's tables 2 and 7.
PAPER = {8: "0.67-0.79", 20: "0.60-0.71"}
ALL = "all"
Line = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A table with its caption; cells are text."""

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class View:
    """Which part of every decode is counted: a length, and whether up to the block that holds the end of text."""

    length: int
    stop: bool

    @property
    def words(self) -> str:
        return f"{self.length} tokens, " + ("up to the end of text" if self.stop else "fixed length")

    def blocks(self, line: Line) -> int:
        """How many blocks that takes."""
        count: int = line["blocks"][str(self.length)]
        return min(count, line["end"] + 1) if self.stop and line["end"] is not None else count

    def draft_free(self, line: Line) -> int:
        return int(sum(line["commits"][: self.blocks(line)]))

    def passes(self, line: Line, entry: Line) -> int | None:
        """None where a method was decoded as a whole, and this view is a part."""
        if "passes" in entry:
            return int(sum(entry["passes"][: self.blocks(line)]))
        return None


@dataclass(frozen=True)
class Method:
    """A row's identity."""

    name: str
    verifier: str
    gamma: float

    @property
    def words(self) -> str:
        parts = [self.name, *([self.verifier] if self.verifier != "coupled" else [])]
        return ", ".join([*parts, *([f"gamma {self.gamma:g}"] if self.gamma else [])])


@dataclass
class Sums:
    """Passes by seed: draft-free, and the method's."""

    draft_free: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    passes: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add(self, seed: int, draft_free: int, passes: int) -> None:
        self.draft_free[seed].append(draft_free)
        self.passes[seed].append(passes)

    @property
    def mean(self) -> float:
        return float(np.mean([n for values in self.passes.values() for n in values]))

    @property
    def ratios(self) -> list[float]:
        """Fewer passes by this factor, of every seed."""
        return [sum(self.draft_free[s]) / sum(self.passes[s]) for s in self.passes]

    @property
    def ratio(self) -> float:
        return sum(map(sum, self.draft_free.values())) / sum(map(sum, self.passes.values()))

    @property
    def text(self) -> str:
        spread = f" ± {np.std(self.ratios, ddof=1):.2f}" if len(self.ratios) > 1 else ""
        return f"{self.mean:.1f} ({self.ratio:.2f}x{spread})"


class Results:
    """A results file, read.

    Raises:
        SpotDeployError: the file holds no results.
    """

    def __init__(self, path: Path):
        lines = read_results(path)
        self.header = lines[0]
        self.prompts = [line for line in lines if line["record"] == "prompt"]
        self.timed = [line for line in lines if line["record"] == "timing"]
        self.config = self.header["config"]
        self.temperatures = sorted({line["temperature"] for line in self.prompts})
        self.budgets: list[int] = sorted(self.config["budgets"])
        found = list(dict.fromkeys(line["kind"] for line in self.prompts))
        self.kinds = [*found, *([ALL] if len(found) > 1 else [])]
        self.lengths: list[int] = sorted(self.config["lengths"])
        ended = any(line["end"] is not None for line in self.prompts)
        self.views = [View(n, stop) for n in self.lengths for stop in ((False, True) if ended else (False,))]
        self.main = self.views[-1]

    def lines(self, kind: str, temperature: float | None = None) -> Iterator[Line]:
        for line in self.prompts:
            if kind in (ALL, line["kind"]) and temperature in (None, line["temperature"]):
                yield line

    def methods(self) -> list[Method]:
        """In the order of the configuration."""
        return list(
            dict.fromkeys(
                Method(e["method"], e["verifier"], e["gamma"]) for line in self.prompts for e in line["methods"]
            )
        )

    def sums(self, view: View, kind: str, temperature: float) -> dict[tuple[Method, int], Sums]:
        """By method and budget."""
        found: dict[tuple[Method, int], Sums] = defaultdict(Sums)
        for line in self.lines(kind, temperature):
            draft_free = view.draft_free(line)
            for entry in line["methods"]:
                passes = view.passes(line, entry)
                if passes is not None:
                    method = Method(entry["method"], entry["verifier"], entry["gamma"])
                    found[method, entry["budget"]].add(line["seed"], draft_free, passes)
        return found

    def draft_free(self, view: View, kind: str, temperature: float) -> float:
        return float(np.mean([view.draft_free(line) for line in self.lines(kind, temperature)]))

    def accuracy(self, kind: str, temperature: float, length: int) -> float | None:
        """Share of right texts among those that are graded."""
        graded = [line["right"][str(length)] for line in self.lines(kind, temperature)]
        graded = [right for right in graded if right is not None]
        return float(np.mean(graded)) if graded else None

    def coverage(self, kind: str, temperature: float, ahead: int, top: int) -> float:
        """Share of roots after which the next `ahead` tokens all are among `top` stale candidates."""
        hits = total = 0
        for line in self.lines(kind, temperature):
            for k, t, hit, roots in line["coverage"]:
                if (k, t) == (ahead, top):
                    hits, total = hits + hit, total + roots
        return hits / max(1, total)

    def token_coverage(self, kind: str, temperature: float) -> float:
        """Share of next commits whose token is the stale argmax."""
        return self.coverage(kind, temperature, 1, 1)

    def committed(self, kind: str, temperature: float) -> float:
        """Mean probability of what was committed."""
        pairs = [line["committed"] for line in self.lines(kind, temperature)]
        return float(sum(p for p, _ in pairs) / max(1, sum(n for _, n in pairs)))

    def argmax(self, kind: str, temperature: float) -> float:
        pairs = [line["argmax"] for line in self.lines(kind, temperature)]
        return float(sum(p for p, _ in pairs) / max(1, sum(n for _, n in pairs)))

    def identities(self) -> tuple[int, list[str]]:
        """How many identities were checked, and those that do not hold.

        Passes and accepted drafts are commits; draft-free decoding commits every position of the generated blocks that
        is not the prompt's.
        """
        checked, broken = 0, []
        width, causal = self.header["block_width"], self.header["attention"] == "block-causal"
        for line in self.prompts:
            where = f"prompt {line['prompt']}, temperature {line['temperature']}, seed {line['seed']}"
            for length, blocks in () if self.header["given_start"] else line["blocks"].items():
                filled = sum(line["commits"][:blocks])
                begin = line["prompt_tokens"] if causal else 0
                wanted = int(length) + -(begin + int(length)) % width
                checked += 1
                if filled != wanted:
                    broken.append(f"{where}: {filled} commits in {length} tokens, not {wanted}")
            for entry in [e for e in line["methods"] if "passes" in e]:
                checked += 1
                sums = [p + a for p, a in zip(entry["passes"], entry["accepted"], strict=True)]
                if sums != line["commits"]:
                    broken.append(f"{where}: {entry['method']} at {entry['budget']}: {sums} are not {line['commits']}")
        return checked, broken


def tables(results: Results) -> list[Table]:
    """All tables that a file has something for."""
    makers: list[Callable[[Results], Iterator[Table]]] = [
        _main, _oracles, _rivals, _temperatures, _lengths, _floors, _decoded, _throughput,
    ]  # fmt: skip
    return [table for make in makers for table in make(results) if table.rows]


def _cells(results: Results, sums: dict[tuple[Method, int], Sums], method: Method) -> list[str]:
    """A method's passes at every budget; empty where it was not measured."""
    return [sums[method, budget].text if (method, budget) in sums else "" for budget in results.budgets]


def _longest(results: Results) -> Iterator[tuple[float, View, str]]:
    """Every temperature with both views of the longest length, and what their tables' names end in."""
    for temperature in results.temperatures:
        for view in [v for v in results.views if v.length == results.main.length]:
            yield temperature, view, f"T{temperature:g}-{'end' if view.stop else 'fixed'}"


def _main(results: Results) -> Iterator[Table]:
    """Tables 2, 8-13, 18, 19, 22: passes of every method at every budget."""
    for temperature, view, suffix in _longest(results):
        rows = []
        for kind in results.kinds:
            sums = results.sums(view, kind, temperature)
            lead = [kind, f"{results.draft_free(view, kind, temperature):.1f}"]
            for method in [m for m in results.methods() if m.gamma == results.config["gammas"][0]]:
                cells = _cells(results, sums, method)
                if any(cells):
                    rows.append([*lead, method.words, *cells])
                    lead = ["", ""]
        yield Table(
            f"passes-{suffix}",
            f"Passes per prompt at temperature {temperature:g}, {view.words} (draft-free over it, ± of seeds)",
            ["kind", "D0", "method", *(f"D{b}" for b in results.budgets)],
            rows,
        )


def _oracles(results: Results) -> Iterator[Table]:
    """Table 7 and the share of what a perfect order could give."""
    for temperature, view, suffix in _longest(results):
        rows = []
        for kind in results.kinds:
            sums = results.sums(view, kind, temperature)
            n = len(list(results.lines(kind, temperature)))
            accuracy = results.accuracy(kind, temperature, view.length)
            lead = [
                kind, str(n), "-" if accuracy is None else f"{accuracy:.2f}",
                f"{results.token_coverage(kind, temperature):.3f}",
                f"{results.coverage(kind, temperature, 8, 1):.3f}",
                f"{results.committed(kind, temperature):.3f}",
            ]  # fmt: skip
            for budget in results.budgets:
                by_name = {m.name: s for (m, b), s in sums.items() if b == budget and _plain(m, results)}
                if SPOT not in by_name or "joint t=2" not in by_name:
                    continue
                spot = by_name[SPOT]
                share = by_name["joint t=2"].mean / spot.mean
                oracles = [f"{by_name[o].ratio:.2f}x" if o in by_name else "" for o in ORACLE_COLUMNS]
                ideal = np.mean([_ideal(line, view, budget) for line in results.lines(kind, temperature)])
                free = results.draft_free(view, kind, temperature)
                rows.append(
                    [*lead, f"D{budget}", f"{spot.ratio:.2f}x", *oracles, f"{free / ideal:.2f}x", f"{share:.2f}",
                     PAPER.get(budget, "")]
                )  # fmt: skip
                lead = [""] * len(lead)
        yield Table(
            f"oracles-{suffix}",
            f"SPOT against oracles at temperature {temperature:g}, {view.words}: fewer passes than draft-free by. "
            "next, next 8: share of roots whose next commit's token is the stale argmax, and all of the next 8; "
            "p: mean probability of committed tokens; ideal: every draft right; share: passes of joint t=2 over "
            "SPOT's, beside the paper's on SDAR-8B",
            ["kind", "n", "right", "next", "next 8", "p", "", SPOT, *ORACLE_COLUMNS, "ideal", "share", "paper"],
            rows,
        )


ORACLE_COLUMNS = ("position", "joint t=1", "joint t=2", "joint t=32")


def _plain(method: Method, results: Results) -> bool:
    return method.verifier == "coupled" and method.gamma == results.config["gammas"][0]


def _ideal(line: Line, view: View, budget: int) -> int:
    """Passes if every draft were right: 1 + ceil((m - 1) / (D + 1)) for a block of m commits."""
    return sum(1 + -(-(m - 1) // (budget + 1)) for m in line["commits"][: view.blocks(line)] if m)


def _rivals(results: Results) -> Iterator[Table]:
    """Whether SPOT needs fewer passes than every rival."""
    rivals = ("SPOT chain", "free chain", "confidence tree", "draft graph")
    rows = []
    for temperature in results.temperatures:
        for kind in results.kinds:
            sums = results.sums(results.main, kind, temperature)
            for budget in results.budgets:
                by_name = {m.name: s.mean for (m, b), s in sums.items() if b == budget and _plain(m, results)}
                others = {name: by_name[name] for name in rivals if name in by_name}
                if SPOT not in by_name or not others:
                    continue
                best = min(others, key=lambda name: others[name])
                verdict = "yes" if by_name[SPOT] < others[best] else "no"
                rows.append(
                    [
                        f"{temperature:g}",
                        kind,
                        f"D{budget}",
                        f"{by_name[SPOT]:.1f}",
                        best,
                        f"{others[best]:.1f}",
                        verdict,
                    ]
                )
    yield Table(
        "rivals",
        f"SPOT and the best of its rivals, passes per prompt, {results.main.words}",
        ["T", "kind", "budget", SPOT, "best rival", "its passes", "SPOT fewer"],
        rows,
    )


def _temperatures(results: Results) -> Iterator[Table]:
    """Tables 1, 21, 22: the sweep of temperatures."""
    if len(results.temperatures) < 2:
        return
    rows = []
    for kind in results.kinds:
        lead = kind
        for temperature in results.temperatures:
            sums = results.sums(results.main, kind, temperature)
            accuracy = results.accuracy(kind, temperature, results.main.length)
            row = [
                lead, f"{temperature:g}", "-" if accuracy is None else f"{accuracy:.2f}",
                f"{results.argmax(kind, temperature):.3f}", f"{results.committed(kind, temperature):.3f}",
                f"{results.draft_free(results.main, kind, temperature):.1f}",
            ]  # fmt: skip
            for verifier in ("coupled", "uncoupled"):
                row += _cells(results, sums, Method(SPOT, verifier, results.config["gammas"][0]))
            rows.append(row)
            lead = ""
    columns = [f"D{b} {v}" for v in ("coupled", "uncoupled") for b in results.budgets]
    yield Table(
        "temperatures",
        f"Temperatures, {results.main.words}: share right, share of commits that are the argmax, their mean "
        "probability, passes draft-free and with SPOT",
        ["kind", "T", "right", "argmax", "p", "D0", *columns],
        rows,
    )


def _lengths(results: Results) -> Iterator[Table]:
    """Table 16."""
    if len(results.lengths) < 2:
        return
    for temperature in results.temperatures:
        rows = []
        for kind in results.kinds:
            lead = kind
            for view in results.views:
                sums = results.sums(view, kind, temperature)
                cells = _cells(results, sums, Method(SPOT, "coupled", results.config["gammas"][0]))
                rows.append([lead, view.words, f"{results.draft_free(view, kind, temperature):.1f}", *cells])
                lead = ""
        yield Table(
            f"lengths-T{temperature:g}",
            f"Generation lengths at temperature {temperature:g}, SPOT",
            ["kind", "length", "D0", *(f"D{b}" for b in results.budgets)],
            rows,
        )


def _floors(results: Results) -> Iterator[Table]:
    """Table 4: mass floors."""
    floors = results.config["gammas"]
    if len(floors) < 2:
        return
    for temperature in results.temperatures:
        rows = []
        for kind in results.kinds:
            sums = results.sums(results.main, kind, temperature)
            lead = kind
            for floor in floors:
                cells = _cells(results, sums, Method(SPOT, "coupled", floor))
                rows.append([lead, f"{floor:g}", *cells])
                lead = ""
        yield Table(
            f"floors-T{temperature:g}",
            f"Mass floors at temperature {temperature:g}, SPOT, {results.main.words}",
            ["kind", "gamma", *(f"D{b}" for b in results.budgets)],
            rows,
        )


def _decoded(results: Results) -> Iterator[Table]:
    """Verifiers that decode another text: passes by commit."""
    found: dict[tuple[float, str, int], Counter[str]] = defaultdict(Counter)
    for line in results.prompts:
        for entry in line["methods"]:
            if "nfe" in entry:
                key = (line["temperature"], entry["verifier"], entry["budget"])
                found[key].update({"nfe": entry["nfe"], "commits": entry["commits"]})
    rows = [
        [f"{t:g}", verifier, f"D{budget}", f"{sums['commits'] / sums['nfe']:.2f}"]
        for (t, verifier, budget), sums in found.items()
    ]
    yield Table(
        "verifiers",
        "Verifiers that decode another text than draft-free decoding of the seed (greedy: of another law)",
        ["T", "verifier", "budget", "commits a pass"],
        rows,
    )


def _throughput(results: Results) -> Iterator[Table]:
    """Times, as ratios to draft-free decodes of the same run."""
    rows = []
    for temperature in results.temperatures:
        for kind in results.kinds:
            ratios: dict[tuple[str, int], list[float]] = defaultdict(list)
            rates: dict[tuple[str, int], list[float]] = defaultdict(list)
            for line in results.timed:
                if line["temperature"] != temperature or kind not in (ALL, line["kind"]):
                    continue
                plain = next(run["seconds"] for run in line["runs"] if not run["budget"])
                for run in line["runs"]:
                    key = (run["method"], run["budget"])
                    ratios[key] += [a / b for a, b in zip(plain, run["seconds"], strict=True)]
                    rates[key] += [line["tokens"] / s for s in run["seconds"]]
            for (method, budget), values in ratios.items():
                low, middle, high = np.percentile(values, (25, 50, 75))
                rate = float(np.median(rates[method, budget]))
                rows.append(
                    [
                        f"{temperature:g}",
                        kind,
                        method,
                        f"D{budget}",
                        f"{rate:.1f}",
                        f"{middle:.2f}x ({low:.2f}-{high:.2f})",
                    ]
                )
    machine = results.header["machine"]["processor"]
    yield Table(
        "throughput",
        f"Times up to the end of text, decodes in turns; against draft-free: median and quartiles. {machine}",
        ["T", "kind", "method", "budget", "tokens/s", "speedup"],
        rows,
    )
