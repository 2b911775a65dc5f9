"""Figures of a results file: the paper's 2 to 5, in kind. The only module that imports matplotlib."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from spot_deploy.bench.config import SPOT
from spot_deploy.bench.measure import AHEAD, TOPS
from spot_deploy.bench.results import ALL, Method, Results

matplotlib.rcParams |= {
    "svg.hashsalt": "spot-deploy",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
LINES = ("-o", "-s", "-^", "-d", "--v", "--<", "--x", "--+", ":", ":o")
CAUSES = ("position", "token", "budget", "edge")


def figures(results: Results) -> dict[str, tuple[Figure, str]]:
    """Figures with captions, by name; those that a file has nothing for are left out."""
    makers: dict[str, Callable[[Results], tuple[Figure, str] | None]] = {
        "budgets": _budgets,
        "coverage": _coverage,
        "order": _order,
        "blocks": _blocks,
        "calibration": _calibration,
        "rejections": _rejections,
    }
    made = {name: make(results) for name, make in makers.items()}
    return {name: found for name, found in made.items() if found is not None}


def _axes(count: int) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(3.0 * count + 1.6, 2.9), layout="constrained")
    return figure, list(np.atleast_1d(figure.subplots(1, count)))


def _legend(figure: Figure, axis: Any) -> None:
    """Beside the plots: lines may be anywhere in them."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=7, frameon=False)


def _budgets(results: Results) -> tuple[Figure, str]:
    """Figures 2a and 3: passes saved by budget, every method and oracle."""
    temperature = results.temperatures[0]
    figure, axes = _axes(len(results.kinds))
    for axis, kind in zip(axes, results.kinds, strict=True):
        by_method: dict[Method, dict[int, float]] = defaultdict(dict)
        for (method, budget), sums in results.sums(results.main, kind, temperature).items():
            if method.verifier == "coupled" and method.gamma == results.config["gammas"][0]:
                by_method[method][budget] = sums.ratio
        axis.set_prop_cycle(color=matplotlib.colormaps["tab20"](range(20)))
        for style, (method, points) in zip(LINES * 9, by_method.items(), strict=False):
            budgets = sorted(points)
            axis.plot([0, *budgets], [1.0, *(points[b] for b in budgets)], style, markersize=3, label=method.words)
        axis.set(title=kind, xlabel="budget D", ylabel="draft-free passes / passes")
    _legend(figure, axes[-1])
    return figure, f"Fewer passes by budget, temperature {temperature:g}, {results.main.words}"


def _coverage(results: Results) -> tuple[Figure, str]:
    """Figure 2b: stale coverage over K commits and t candidates."""
    temperature = results.temperatures[0]
    figure, axes = _axes(len(results.kinds))
    for axis, kind in zip(axes, results.kinds, strict=True):
        for style, top in zip(LINES, TOPS, strict=False):
            values = [results.coverage(kind, temperature, ahead, top) for ahead in AHEAD]
            axis.plot(AHEAD, values, style, markersize=3, label=f"t = {top}")
        axis.set(title=kind, xlabel="next K commits", ylabel="all among t stale candidates", ylim=(0, 1.02))
    _legend(figure, axes[-1])
    return figure, f"Stale coverage, temperature {temperature:g}"


def _order(results: Results) -> tuple[Figure, str] | None:
    """Figure 4, left: what is known of order and of tokens, by block."""
    sums: dict[int, Any] = defaultdict(lambda: np.zeros(3))
    for line in results.lines(ALL, results.temperatures[0]):
        for block, row in enumerate(line["order"]):
            sums[block] += row
    blocks = [b for b in sorted(sums) if sums[b][2]]
    if not blocks:
        return None
    figure, (axis,) = _axes(1)
    axis.plot(blocks, [sums[b][1] / sums[b][2] for b in blocks], "-o", label="stale argmax token is right")
    axis.plot(blocks, [sums[b][0] / sums[b][2] for b in blocks], "-s", label="stale most confident position commits")
    axis.set(xlabel="block", ylabel="share of next commits", ylim=(0, 1.02))
    axis.legend(fontsize=7)
    return figure, f"Order and tokens by block, temperature {results.temperatures[0]:g}"


def _spot(results: Results, temperature: float) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Lines with SPOT's entry at the largest budget."""
    return [
        (line, entry)
        for line in results.lines(ALL, temperature)
        for entry in line["methods"]
        if (entry["method"], entry["verifier"], entry["budget"]) == (SPOT, "coupled", results.budgets[-1])
        and entry["gamma"] == results.config["gammas"][0]
    ]


def _blocks(results: Results) -> tuple[Figure, str] | None:
    """Figure 4, right: accepted drafts a pass, by block."""
    figure, (axis,) = _axes(1)
    for style, temperature in zip(LINES, results.temperatures, strict=False):
        accepted: Counter[int] = Counter()
        rounds: Counter[int] = Counter()
        for _, entry in _spot(results, temperature):
            for block, (passes, taken) in enumerate(zip(entry["passes"], entry["accepted"], strict=True)):
                accepted[block] += taken
                rounds[block] += passes - 1
        blocks = [b for b in sorted(rounds) if rounds[b]]
        if blocks:
            axis.plot(blocks, [accepted[b] / rounds[b] for b in blocks], style, label=f"T = {temperature:g}")
    if not axis.lines:
        return None
    axis.set(xlabel="block", ylabel="accepted drafts a round", ylim=(0, None))
    axis.legend(fontsize=7)
    return figure, f"Accepted drafts by block, SPOT at D{results.budgets[-1]}"


def _calibration(results: Results) -> tuple[Figure, str] | None:
    """Figure 5, left: mass of drafted states against how often they were accepted."""
    figure, (axis,) = _axes(1)
    for style, temperature in zip(LINES, results.temperatures, strict=False):
        rows = [line["reliability"] for line in results.lines(ALL, temperature)]
        if not rows:
            continue
        sums = np.sum(np.array(rows, float), axis=0)
        there = sums[sums[:, 2] > 0]
        if len(there):
            axis.plot(there[:, 0] / there[:, 2], there[:, 1] / there[:, 2], style, label=f"T = {temperature:g}")
    if not axis.lines:
        return None
    axis.plot([0, 1], [0, 1], "k:", linewidth=0.8)
    axis.set(xlabel="mass of drafted states", ylabel="accepted")
    axis.legend(fontsize=7)
    return figure, f"Calibration of node mass, SPOT at D{results.budgets[-1]}"


def _rejections(results: Results) -> tuple[Figure, str] | None:
    """Figure 5, right: why rounds ended."""
    counts = {t: Counter[str]() for t in results.temperatures}
    for temperature in results.temperatures:
        for _, entry in _spot(results, temperature):
            counts[temperature].update(entry["ended"])
    if not any(counts.values()):
        return None
    figure, (axis,) = _axes(1)
    base = np.zeros(len(counts))
    for cause in CAUSES:
        values = np.array([c[cause] / max(1, sum(c.values())) for c in counts.values()])
        axis.bar([f"T = {t:g}" for t in counts], values, bottom=base, label=cause)
        base += values
    axis.set(ylabel="share of drafted rounds", ylim=(0, 1))
    axis.legend(fontsize=7)
    return figure, f"Why rounds ended, SPOT at D{results.budgets[-1]}"
