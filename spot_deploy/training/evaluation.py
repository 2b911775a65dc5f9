"""`eval-drafter`: passes by budget against the oracles, with stale coverage and next-commit accuracy beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spot_deploy.bench.grading import grade
from spot_deploy.engines.contracts import OrderSession
from spot_deploy.runtime.api import Runtime
from spot_deploy.runtime.decode import DecodeOptions
from spot_deploy.runtime.drafters import Drafter, OracleDrafter, SpotDrafter
from spot_deploy.runtime.features import Stale, order_inputs
from spot_deploy.runtime.noise import Noise
from spot_deploy.runtime.sampler import candidate_odds
from spot_deploy.training.prompts import Prompt
from spot_deploy.training.records import DEPTHS
from spot_deploy.training.replay import Trajectory

ORACLES: dict[str, int | None] = {"position": None, "joint t=1": 1, "joint t=2": 2, "joint t=32": 32}


@dataclass
class Row:
    """Sums over the prompts of one kind."""

    prompts: int = 0
    draft_free: int = 0
    covered: int = 0
    look_ahead: int = 0
    answers: int = 0
    right: int = 0
    committed: list[float] = field(default_factory=list)
    passes: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))

    def as_dict(self) -> dict[str, Any]:
        """Means per prompt."""
        n = self.prompts
        return {
            "prompts": n,
            "stale_coverage": self.covered / max(1, self.look_ahead),
            "committed_probability": float(np.mean(self.committed)) if self.committed else None,
            "exact_match": self.right / self.answers if self.answers else None,
            "draft_free": self.draft_free / n,
            "passes": {name: {str(b): v / n for b, v in row.items()} for name, row in self.passes.items()},
        }


def evaluate(
    runtime: Runtime,
    prompts: Sequence[Prompt],
    *,
    chat: bool,
    budgets: Sequence[int],
    options: DecodeOptions,
    others: Mapping[str, OrderSession] | None = None,
    progress: Callable[[int, str], None] = lambda done, note: None,
) -> dict[str, Any]:
    """Decode every prompt draft-free once, then replay SPOT and the oracles at each budget.

    Args:
        others: further order models by name, such as those of other targets.

    Returns:
        `kinds`: means per prompt by kind, and `all`, among them stale coverage, the mean probability of what was
        committed, and the share of texts that are right by the prompt's grader; `accuracy_by_depth` of the
        order model and of stale confidence.
    """
    options = runtime.resolve(options)
    rows: dict[str, Row] = defaultdict(Row)
    hits: dict[int, list[tuple[bool, bool]]] = {depth: [] for depth in DEPTHS}
    order = runtime.order_model
    spot = runtime.spot_drafter(options) if order is not None else None
    for number, prompt in enumerate(prompts):
        trajectory = Trajectory(keep_rows=options.draft_tail)
        given: Any = [{"role": "user", "content": prompt.text}] if chat else prompt.text
        decoded = runtime.generate(given, options, budget=0, seed=options.seed + number, observe=trajectory)
        noise = None
        if options.temperature > 0 and options.verifier == "coupled":
            noise = Noise(options.seed + number, options.sample)
        drafters: dict[str, Drafter] = {} if spot is None else {"SPOT": spot}
        drafters |= {f"SPOT {name}": SpotDrafter.of(other, options) for name, other in (others or {}).items()}
        drafters |= {name: OracleDrafter(trajectory.lookup, top) for name, top in ORACLES.items()}
        counts = {
            name: {budget: trajectory.passes(drafter, budget, noise) for budget in budgets if budget}
            for name, drafter in drafters.items()
        }
        covered, ahead = trajectory.coverage()
        committed = trajectory.committed()
        for kind in {prompt.kind, "all"}:
            row = rows[kind]
            row.prompts += 1
            row.draft_free += trajectory.commits
            row.covered += covered
            row.look_ahead += ahead
            row.committed += committed
            right = grade(decoded.text, prompt.answer, prompt.grader, run_code=False)
            if right is not None:
                row.answers += 1
                row.right += right
            for name, by_budget in counts.items():
                for budget, value in by_budget.items():
                    row.passes[name][budget] += value
        if order is not None:
            _accuracy(runtime, trajectory, noise, hits)
        progress(number + 1, "")
    return {
        "kinds": {kind: rows[kind].as_dict() for kind in [*sorted(set(rows) - {"all"}), "all"]},
        "accuracy_by_depth": {
            str(depth): {
                "model": float(np.mean([m for m, _ in found])),
                "stale_confidence": float(np.mean([c for _, c in found])),
                "examples": len(found),
            }
            for depth, found in hits.items()
            if found
        },
    }


def _accuracy(
    runtime: Runtime, trajectory: Trajectory, noise: Noise | None, hits: dict[int, list[tuple[bool, bool]]]
) -> None:
    """Next-commit accuracy at every fourth anchor of a trajectory."""
    assert runtime.order_model is not None
    for steps in trajectory.blocks:
        commits = [step.commit for step in steps]
        for anchor in range(0, len(steps), 4):
            depths = [d for d in DEPTHS if anchor + d < len(steps)]
            if not depths:
                continue
            stale = Stale.of(steps[anchor].head, runtime.decoding.block_width)
            head, state = steps[anchor].head, steps[anchor].state
            odds = [candidate_odds(head, state, noise, anchor + d) for d in depths]
            inputs = order_inputs(stale, [commits[anchor : anchor + d] for d in depths], odds)
            log_q = runtime.order_model.run(inputs.features, inputs.state_id, inputs.depth, inputs.masked)
            confidence = np.where(inputs.masked, inputs.features[:, :, 35], -np.inf).argmax(1)
            for d, best, guess in zip(depths, log_q.argmax(1), confidence, strict=True):
                label = commits[anchor + d].position
                hits[d].append((bool(best == label), bool(guess == label)))
