"""`calibrate`: the budget and mass floor that are fastest on this engine and machine, on prompts of the user.

Prompts are decoded draft-free once. Which drafts would be accepted, at any budget, floor, temperature of the order
model and hedge gate, is then a matter of comparing with these trajectories (see training.replay). A pass over S states
is charged what the engine was measured to take for it, drafting what it took here, and the rest is the same for all.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from spot_deploy.costs import CurveOptions, cost_curves, pass_seconds
from spot_deploy.engines.contracts import TargetSession
from spot_deploy.engines.defaults import Defaults
from spot_deploy.engines.errors import usage_error
from spot_deploy.runtime.api import Runtime
from spot_deploy.runtime.decode import DecodeOptions
from spot_deploy.runtime.drafters import Drafter, Round, SpotDrafter
from spot_deploy.runtime.noise import Noise
from spot_deploy.runtime.tree import Node
from spot_deploy.training.prompts import Prompt
from spot_deploy.training.replay import Trajectory

FLOORS = (0.0, 0.02, 0.05, 0.1, 0.2)
TAUS = (0.8, 1.0, 1.25)
GATES = (0.0, 0.4, 0.6, 0.8)
STATES = (1, 2, 3, 4, 6, 9, 13, 17, 21)
BINS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)


@dataclass
class _Timed:
    """A drafter, and the seconds that it took."""

    drafter: Drafter
    seconds: float = 0.0

    def draft(self, view: Round) -> list[Node]:
        began = time.perf_counter()
        nodes = self.drafter.draft(view)
        self.seconds += time.perf_counter() - began
        return nodes


def calibrate(
    runtime: Runtime,
    session: TargetSession,
    prompts: Sequence[Prompt],
    *,
    chat: bool,
    budgets: Sequence[int],
    options: DecodeOptions,
    curve: CurveOptions,
    progress: Callable[[int, str], None] = lambda done, note: None,
) -> tuple[Defaults, dict[str, Any]]:
    """Choose budget, floor, tau and hedge gate.

    Args:
        session: the target's engine, to time.
        budgets: to choose among; 0 is always among them.
        options: temperature, seed (prompt n takes seed + n), length.

    Returns:
        The defaults, and the evidence: the grid of passes and predicted speedups, settings tried, reliability of the
        mass of drafted states, and the cost curve.

    Raises:
        SpotDeployError: the bundle has no order model, or the target's passes are no block-causal ones (exit code 2).
    """
    decoding = runtime.decoding
    if decoding.attention != "block-causal":
        raise usage_error(
            "calibrate",
            "passes of targets with full attention are not timed yet",
            seen=decoding.attention,
            fix="choose --budget by eval-drafter",
        )
    options = runtime.resolve(options)
    spot = runtime.spot_drafter(options)
    coupled = options.temperature > 0 and options.verifier == "coupled"
    runs: list[tuple[Trajectory, Noise | None]] = []
    for number, prompt in enumerate(prompts):
        trajectory = Trajectory(keep_rows=options.draft_tail)
        given: Any = [{"role": "user", "content": prompt.text}] if chat else prompt.text
        runtime.generate(given, options, budget=0, seed=options.seed + number, observe=trajectory)
        runs.append((trajectory, Noise(options.seed + number, options.sample) if coupled else None))
        progress(number + 1, "")
    drafted = sorted({b for b in budgets if b})
    most = max(drafted)
    bucket = decoding.buckets[len(decoding.buckets) // 2]
    states = sorted({n for n in (*STATES, 1 + most) if n <= 1 + most})
    costs = cost_curves(session, decoding, decoding.block_width, bucket, drafted, replace(curve, states=states))
    spot, settings = _settings(spot, runs, min(drafted, key=lambda b: abs(b - 8)))
    openings = sum(len(t.blocks) for t, _ in runs) * costs["opening"]["median"]
    commits = sum(t.commits for t, _ in runs)
    plain = openings + (commits - sum(len(t.blocks) for t, _ in runs)) * pass_seconds(costs, 1)
    grid = [{"budget": 0, "gamma": 0.0, "passes": commits, "states": 1.0, "seconds": plain, "speedup": 1.0}]
    for budget in drafted:
        for gamma in FLOORS:
            timed = _Timed(replace(spot, gamma=gamma))
            rounds = [r for trajectory, noise in runs for r in trajectory.rounds(timed, budget, noise)]
            seconds = openings + sum(pass_seconds(costs, r.states) for r in rounds) + timed.seconds
            passes = len(rounds) + sum(len(t.blocks) for t, _ in runs)
            grid.append(
                {
                    "budget": budget,
                    "gamma": gamma,
                    "passes": passes,
                    "states": float(np.mean([r.states for r in rounds])),
                    "seconds": seconds,
                    "speedup": plain / seconds,
                }
            )
    best = max(grid, key=lambda row: row["speedup"])
    defaults = Defaults(int(best["budget"]), float(best["gamma"]), spot.tau, spot.hedge_gate)
    evidence = {
        "prompts": len(prompts),
        "temperature": options.temperature,
        "commits": commits,
        "grid": grid,
        "settings": settings,
        "reliability": reliability(spot, runs, most),
        "curve": costs,
        "curve_options": asdict(curve),
    }
    return defaults, evidence


def _settings(
    spot: SpotDrafter, runs: Sequence[tuple[Trajectory, Noise | None]], budget: int
) -> tuple[SpotDrafter, list[dict[str, float]]]:
    """The temperature of the order model and the hedge gate that need the fewest passes; the bundle's where equal."""
    tried: list[dict[str, float]] = []

    def passes(tau: float, gate: float) -> int:
        drafter = replace(spot, tau=tau, hedge_gate=gate, gamma=0.0)
        count = sum(trajectory.passes(drafter, budget, noise) for trajectory, noise in runs)
        tried.append({"tau": tau, "hedge_gate": gate, "budget": budget, "passes": count})
        return count

    gates = sorted({*GATES, spot.hedge_gate}, key=lambda g: (g != spot.hedge_gate, g))
    gate = min(gates, key=lambda g: passes(spot.tau, g))
    taus = sorted({*TAUS, spot.tau}, key=lambda t: (t != spot.tau, t))
    tau = min(taus, key=lambda t: passes(t, gate))
    return replace(spot, tau=tau, hedge_gate=gate), tried


def reliability(
    spot: SpotDrafter, runs: Sequence[tuple[Trajectory, Noise | None]], budget: int
) -> list[dict[str, float]]:
    """How often drafted states were accepted, by their mass: where these agree, mass is a probability."""
    seen: list[tuple[float, bool]] = []
    for trajectory, noise in runs:
        trajectory.rounds(replace(spot, gamma=0.0), budget, noise, told=lambda node, ok: seen.append((node.mass, ok)))
    mass, accepted = np.array([m for m, _ in seen]), np.array([ok for _, ok in seen], float)
    rows = []
    for low, high in itertools.pairwise(BINS):
        inside = (mass > low) & (mass <= high)
        if inside.any():
            rows.append(
                {
                    "low": low,
                    "high": high,
                    "states": int(inside.sum()),
                    "mass": float(mass[inside].mean()),
                    "accepted": float(accepted[inside].mean()),
                }
            )
    return rows
