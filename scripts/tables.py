"""Put the tables of README.md and demo/README.md in place again, from demo/results and the order models' cards.

A line `<!-- NAME -->` in a document stands before the table of that name (see TABLES). `--check` changes nothing, and
fails where a table is not what the results say.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spot_deploy.bench.measure import BINS
from spot_deploy.bench.results import ALL, Results

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "demo/README.md")
BUDGETS = (3, 8, 20)
ENGINE_BUDGETS = (1, 3, 8)
FOLDERS = {"main": "demo", "b16": "demo/b16", "full": "demo/full"}
TARGETS = {name: folder for name, folder in FOLDERS.items() if (ROOT / folder / "order-model").is_dir()}
MARKER = re.compile(r"<!-- ([a-z0-9-]+) -->")


def read(name: str) -> Any:
    return json.loads((ROOT / "demo" / f"{name}.json").read_text(encoding="utf-8"))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def less(row: dict[str, Any], drafter: str, budget: int) -> str:
    """Passes, and how many times fewer than draft-free."""
    passes = row["passes"][drafter][str(budget)]
    return f"{passes:.1f} ({row['draft_free'] / passes:.2f}x)"


def right(row: dict[str, Any]) -> str:
    return "-" if row["exact_match"] is None else f"{row['exact_match']:.2f}"


def share(row: dict[str, Any]) -> str:
    """Passes of the joint oracle over SPOT's, at D8 and D20."""
    joint, spot = row["passes"]["joint t=2"], row["passes"]["SPOT"]
    return ", ".join(f"{joint[b] / spot[b]:.2f}" for b in ("8", "20"))


def passes(name: str) -> list[str]:
    """Kinds that are mastered first."""
    kinds = read(f"results/{name}")["kinds"]

    def mastered(kind: str) -> tuple[bool, float, float]:
        row = kinds[kind]
        exact = -1.0 if row["exact_match"] is None else round(row["exact_match"], 2)
        return kind == "all", -exact, -row["stale_coverage"]

    rows = []
    for kind in sorted(kinds, key=mastered):
        row = kinds[kind]
        lead = [kind, str(row["prompts"]), right(row), f"{row['stale_coverage']:.3f}"]
        lead += [f"{row['committed_probability']:.3f}", f"{row['draft_free']:.1f}"]
        rows.append([*lead, *(less(row, "SPOT", b) for b in BUDGETS), less(row, "joint t=2", 8), share(row)])
    columns = [
        "kind",
        "n",
        "right",
        "coverage",
        "p",
        "D0",
        *(f"SPOT D{b}" for b in BUDGETS),
        "joint t = 2, D8",
        "share",
    ]
    return table(columns, rows)


def order_accuracy() -> list[str]:
    """Next-commit accuracy of the order models on held-out blocks, against stale confidence."""
    cards = {
        name: read(f"{folder.removeprefix('demo').lstrip('/') or '.'}/order-model/order_model")
        for name, folder in TARGETS.items()
    }
    rows = []
    for depth in ("1", "2", "4", "8", "16"):
        row = [depth + (" (right after the root)" if depth == "1" else "")]
        for card in cards.values():
            found = card["accuracy_by_depth"].get(depth)
            row += [f"{found['model']:.3f}", f"{found['stale_confidence']:.3f}"] if found else ["", ""]
        rows.append(row)
    columns = ["commits after the pass", *(f"{n}{what}" for n in cards for what in ("", ", stale confidence"))]
    return table(columns, rows)


def transfer() -> list[str]:
    """Every order model on every target: passes at D8, all kinds of the file."""
    rows = []
    for name in TARGETS:
        for kind, row in read(f"results/transfer-{name}")["kinds"].items():
            cells = [
                less(row, "SPOT" if other == name else f"SPOT {folder}/order-model", 8)
                for other, folder in TARGETS.items()
            ]
            lead = [
                name,
                kind,
                str(row["prompts"]),
                right(row),
                f"{row['stale_coverage']:.3f}",
                f"{row['draft_free']:.1f}",
            ]
            rows.append([*lead, *cells, less(row, "joint t=2", 8), share(row)])
    models = [f"order model of {name}" for name in TARGETS]
    return table(["target", "kind", "n", "right", "coverage", "D0", *models, "joint t = 2", "share"], rows)


def bench() -> list[str]:
    """Every method of the results of `bench`, over all their kinds: how many times fewer passes than draft-free."""
    results = Results(ROOT / "demo" / "results" / "bench.jsonl")
    cells = [(t, results.sums(results.main, ALL, t), b) for t in results.temperatures for b in results.budgets]
    rows = []
    for method in results.methods():
        found = [f"{sums[method, b].ratio:.2f}x" if (method, b) in sums else "" for _, sums, b in cells]
        if any(found):  # not so if texts of its own were decoded
            rows.append([method.words, *found])
    return table(["", *(f"T {t:g}, D{b}" for t, _, b in cells)], rows)


def reliability() -> list[str]:
    """Mass of drafted states against how many were accepted."""
    sums = [[0.0, 0, 0] for _ in BINS[1:]]
    for line in Results(ROOT / "demo" / "results" / "bench.jsonl").prompts:
        for total, found in zip(sums, line["reliability"], strict=True):
            total[:] = [a + b for a, b in zip(total, found, strict=True)]
    rows = [
        [f"{low:g} to {high:g}", str(n), f"{mass / n:.3f}", f"{accepted / n:.3f}"]
        for low, high, (mass, accepted, n) in zip(BINS, BINS[1:], sums, strict=False)
        if n
    ]
    return table(["mass", "states", "mean mass", "accepted"], rows)


def engines() -> list[str]:
    """Tokens per second of every CPU engine up to the end of text, and what a pass over several states costs."""
    target = read("results/engines")["targets"][0]
    rows = {(row["engine"], row["budget"]): row for row in target["decode"][0]["rows"]}
    lines = []
    for curve in target["curves"]:
        cells = [curve["engine"], f"{rows[curve['engine'], 0]['tokens_per_second']['median']:.0f}"]
        for budget in ENGINE_BUDGETS:
            row = rows[curve["engine"], budget]
            cells.append(f"{row['tokens_per_second']['median']:.0f} ({row['speedup']['median']:.2f}x)")
        cells.append(", ".join(f"{curve['curves']['half'][str(1 + b)]['c']:.2f}" for b in ENGINE_BUDGETS))
        cells.append(", ".join(f"{rows[curve['engine'], b]['oracle_bound']:.2f}x" for b in ENGINE_BUDGETS))
        lines.append(cells)
    blank = [""] * (len(ENGINE_BUDGETS) + 2)
    for row in target["decode"][0]["rows"]:
        if row["engine"].startswith("torch"):
            lines.append(
                [f"transformers, plain loop, {row['engine']}", f"{row['tokens_per_second']['median']:.0f}", *blank]
            )
    columns = ["engine", "draft-free, tokens/s", *(f"SPOT D{b}" for b in ENGINE_BUDGETS)]
    states = ", ".join(str(1 + b) for b in ENGINE_BUDGETS)
    return table([*columns, f"cost of {states} states", "bound"], lines)


TABLES: dict[str, Callable[[], list[str]]] = {
    "passes": lambda: passes("passes"),
    "passes-fixed": lambda: passes("passes-fixed"),
    "passes-b16": lambda: passes("passes-b16"),
    "passes-b16-fixed": lambda: passes("passes-b16-fixed"),
    "order-accuracy": order_accuracy,
    "transfer": transfer,
    "bench": bench,
    "reliability": reliability,
    "engines": engines,
}


def renewed(text: str) -> str:
    """A document with every marked table as the results have it.

    Raises:
        KeyError: a marker names no table.
    """
    lines, out = text.split("\n"), []
    at = 0
    while at < len(lines):
        out.append(lines[at])
        at += 1
        if marker := MARKER.fullmatch(lines[at - 1]):
            while at < len(lines) and lines[at].startswith("|"):
                at += 1
            out += TABLES[marker[1]]()
    return "\n".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where a table is out of date")
    check = parser.parse_args().check
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        if (new := renewed(text)) != text:
            stale.append(name)
            if not check:
                path.write_text(new, encoding="utf-8")
    if stale:
        print(("out of date: " if check else "renewed: ") + ", ".join(stale))
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
