"""What can be proven of an engine on the machine that runs it. `build-engine` uses a part, `verify` all of it.

Six gates: elementwise and argmax against the golden pass that the checkpoint's own class gave at export; commit traces;
isolation (other states at the same shape change nothing); joining (a state alone against the same among others); and
speculative equality, strict where joining is bit-equal, else by audit: drafted decoding may differ from draft-free only
in near ties within the proven bounds (see runtime.audit).
"""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spot_deploy.engines.contracts import Array, TargetSession
from spot_deploy.engines.errors import VERIFICATION, SpotDeployError
from spot_deploy.engines.files import read_json
from spot_deploy.engines.probe import probe_invariance
from spot_deploy.runtime.api import Result, Runtime
from spot_deploy.runtime.audit import audit
from spot_deploy.runtime.bundle import Bundle
from spot_deploy.runtime.decode import CommitEvent, DecodeOptions
from spot_deploy.runtime.drafters import Drafter, OracleDrafter
from spot_deploy.runtime.head import summarise
from spot_deploy.runtime.target import BlockCausalTarget
from spot_deploy.runtime.text import GOLDEN, GOLDEN_PASS
from spot_deploy.training.replay import Trajectory

# Largest difference of a head logit that an engine of a precision may show, in proportion to the largest logit (at
# least 10). Quantised weights make another network: their argmax agreement is reported, and only a floor is asked for.
TOLERANCES = {"f32": 1e-5, "bf16": 3e-2, "f16": 3e-3}
# Largest difference of a logit between a state alone and the same among others that an engine may show at all.
JOINING = {"f32": 1e-3, "f16": 0.1}
JOINING_OTHERS = 0.5  # bfloat16 and what computes in it: 6e-2 was seen
HEAD_ROWS = 8  # rows whose head is compared with the full logits of the same pass
ARGMAX_FLOOR = 0.1  # a random network has hardly any margin
MOST_SITTINGS = 8  # of the equality gate's runs, with other seeds each time
ENOUGH_ACCEPTED = 100  # a run that accepted fewer drafts has tested nothing


@dataclass(frozen=True)
class Gate:
    """One check: what was measured in words, the figures, and whether it passed."""

    name: str
    passed: bool
    text: str
    figures: dict[str, Any]


def golden_pass(bundle: Path) -> dict[str, Array]:
    """The arrays of `parity.GoldenPass`.

    Raises:
        SpotDeployError: the file is not what export writes.
    """
    try:
        with np.load(bundle / GOLDEN_PASS, allow_pickle=False) as file:
            return {name: file[name] for name in ("clean", "states", "top_logits", "top_ids")}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise SpotDeployError(
            "golden", f"{GOLDEN_PASS} is missing or damaged", seen=str(error)[:200], fix="export the bundle again"
        ) from error


def _apart(seen: Array, wanted: Array) -> float:
    """Largest difference; infinite where one is finite and the other is not."""
    finite = np.isfinite(wanted)
    if not np.array_equal(finite, np.isfinite(seen)):
        return float("inf")
    return float(np.abs(seen[finite] - wanted[finite]).max(initial=0.0))


def elementwise(bundle: Bundle, session: TargetSession, precision: str) -> list[Gate]:
    """Prefill and a tree of nine states against the golden pass: largest logits and best tokens."""
    golden = golden_pass(bundle.path)
    target = BlockCausalTarget(session, bundle.manifest.decoding, 0.0)
    target.prefill(golden["clean"])
    out = target.whole(golden["states"])
    wanted, seen = golden["top_logits"], out.top_logits
    finite = bool(np.isfinite(seen[np.isfinite(wanted)]).all())
    both = np.isfinite(wanted) & np.isfinite(seen)
    difference = float(np.abs(seen[both] - wanted[both]).max(initial=0.0))
    scale = max(10.0, float(np.abs(wanted[both]).max(initial=0.0)))
    allowed = TOLERANCES.get(precision)
    # A trained network may round more than that in float32 itself: what export measured and allowed, for values of 10.
    rounding = bundle.manifest.parity["measured"].get("rounding", {}).get("allowed", 0.0) / 10
    if allowed is not None:
        allowed = max(allowed, rounding)
    close = finite and (allowed is None or difference <= allowed * scale)
    bar = "no bound for quantised weights" if allowed is None else f"at most {allowed * scale:.3g}"
    text = f"largest difference {difference:.3g} ({bar})" if finite else "not finite"
    rows = np.linspace(0, len(wanted) - 1, HEAD_ROWS).astype(int)
    full = summarise(np.stack([out.row(int(m)) for m in rows]), 1.0)
    head = max(_apart(seen[rows], full[0]), _apart(out.rest_lse[rows], full[2]))
    if not head <= TOLERANCES["f32"] * scale:  # the head is computed in float32 in every precision
        close, text = False, text + f"; the head is off from its own logits by {head:.3g}"
    figures = {
        "max_abs": difference,
        "allowed": None if allowed is None else allowed * scale,
        "finite": finite,
        "head": head,
    }
    gates = [Gate("elementwise", close, text, figures)]
    differ = out.top_ids[:, 0] != golden["top_ids"][:, 0]
    margin = wanted[:, 0] - wanted[:, 1] if wanted.shape[1] > 1 else np.full(len(wanted), np.inf)
    clear = differ & (margin > 2 * (allowed or 0) * scale) if allowed is not None else differ
    agreement = 1 - float(differ.mean())
    passed = not clear.any() if allowed is not None else agreement >= ARGMAX_FLOOR
    ties = int(differ.sum() - clear.sum()) if allowed is not None else 0
    text = f"{agreement:.1%} of {len(differ)} rows" + (f", {ties} differ by a near tie" if ties else "")
    if allowed is None:
        text += f" (of quantised weights only {ARGMAX_FLOOR:.0%} are asked: another network than the float32 one)"
    gates.append(Gate("argmax", bool(passed), text, {"rows": len(differ), "agreement": agreement, "near_ties": ties}))
    return gates


def invariance(bundle: Bundle, session: TargetSession, budgets: tuple[int, ...], requests: int) -> dict[str, Any]:
    """The invariance probe over all that an engine shall serve."""
    decoding = bundle.manifest.decoding
    states = max(2, 1 + budgets[-1])
    window = decoding.window
    whole = {} if decoding.exact_cache else {2 * window: states, 3 * window + 1: states, 8 * window + 1: 3}
    return probe_invariance(session, decoding.shape, decoding.window, decoding.buckets, states, requests, whole=whole)


def invariance_gates(
    probe: dict[str, Any], precision: str, error: float | None, *, strict_before: bool = False
) -> list[Gate]:
    """Isolation must be bit-exact; joining decides between strict equality and audit, and must be small.

    Args:
        error: how far a logit may be off (`allowed` of the elementwise gate), where that is more than JOINING.
        strict_before: the engine's record says that it is bit-equal.
    """
    isolation, joining = probe["isolation"], probe["joining"]
    bound = max(JOINING.get(precision, JOINING_OTHERS), error or 0.0)
    joined = joining["unequal"] == 0 or (joining["max_abs"] <= bound and not strict_before)
    note = "" if joined else f"; {'its record says bit-equal' if strict_before else f'at most {bound:g} is allowed'}"

    def text(kind: dict[str, Any]) -> str:
        if not kind["unequal"]:
            return f"bit-equal in {kind['comparisons']} comparisons"
        return (
            f"{kind['unequal']} of {kind['comparisons']} comparisons differ by up to {kind['max_abs']:.3g}, "
            f"{kind['flips']} best tokens changed"
        )

    return [
        Gate("isolation", isolation["unequal"] == 0, text(isolation), dict(isolation)),
        Gate("joining", joined, text(joining) + note, dict(joining)),
    ]


def golden_traces(bundle: Bundle) -> list[dict[str, Any]]:
    """The golden prompts of the bundle, with commit traces if the whole native class ran at export."""
    traces: list[dict[str, Any]] = read_json(bundle.path / GOLDEN, code="golden", fix="export the bundle again")[
        "traces"
    ]
    return traces


def commit_traces(
    runtime: Runtime, session: TargetSession, bundle: Bundle, precision: str, error: float | None
) -> Gate:
    """Replay the golden commit traces draft-free. In float32 only near ties may differ, by audit.

    Args:
        error: how far a logit may be off (`allowed` of the elementwise gate).
    """
    traces = [trace for trace in golden_traces(bundle) if trace["commits"]]
    if not traces:
        text = "the bundle has none (exported without --parity full); the golden pass stands alone"
        return Gate("traces", True, text, {"traces": 0, "commits": 0, "first_differences": []})
    commits, differences, first_text, near_ties, violations = 0, [], "", 0, 0
    for trace in traces:
        chosen = {key: trace[key] for key in ("temperature", "seed", "max_new_tokens", "whole")}
        options = runtime.resolve(DecodeOptions(budget=0, ignore_eos=True, **chosen))
        events = runtime.stream(trace["prompt"], options)
        seen = [[event.position, event.token] for event in events if isinstance(event, CommitEvent)]
        pairs = itertools.zip_longest(seen, trace["commits"])
        first = next((index for index, (commit, wanted) in enumerate(pairs) if commit != wanted), None)
        differences.append(first)
        if first is not None and not first_text:
            pair = [(commits[first] if first < len(commits) else None) for commits in (seen, trace["commits"])]
            first_text = f"; commit {first} is position, token = {pair[0]}, golden {pair[1]}"
        if first is not None and precision == "f32":
            replayed = audit(
                session, bundle.manifest.decoding, np.array(trace["prompt"]), options, trace["commits"], error or 0.0
            )
            near_ties, violations = near_ties + replayed.near_ties, violations + replayed.violations
        commits += len(seen)
    differ = [n for n in differences if n is not None]
    text = f"{commits} commits equal"
    if differ:
        text = f"{len(differ)} of {len(traces)} traces differ, first at commit {min(differ)}{first_text}"
        if precision == "f32":
            text += f"; {near_ties} near ties, {violations} not explained by them"
        else:
            text += f" (told, not gated, in {precision})"
    figures = {
        "traces": len(traces),
        "commits": commits,
        "first_differences": differences,
        "near_ties": near_ties,
        "violations": violations,
    }
    return Gate("traces", commits > 0 and not violations, text, figures)


def _runs(
    runtime: Runtime, bundle: Bundle, budgets: tuple[int, ...], seed: int
) -> Iterator[tuple[Any, DecodeOptions, Drafter]]:
    """Prompt, options, drafter of the equality gate's drafted runs: SPOT, and an oracle so that drafts are accepted."""
    decoding = bundle.manifest.decoding
    room = decoding.max_positions // 2
    for index, trace in enumerate(golden_traces(bundle)):
        tokens = min(max(trace["max_new_tokens"], 2 * decoding.block_width, 64), room)
        if decoding.positions(len(trace["prompt"]), tokens) > decoding.max_positions:
            continue
        for temperature in (0.0, 1.0):
            options = runtime.resolve(
                DecodeOptions(
                    temperature=temperature,
                    seed=seed + index,
                    max_new_tokens=tokens,
                    ignore_eos=True,
                    whole=trace["whole"],
                )
            )
            trajectory = Trajectory()
            runtime.generate(trace["prompt"], replace(options, budget=0), observe=trajectory)
            for budget in sorted({*budgets[1:2], *budgets[-1:]} - {0}):
                drafted = replace(options, budget=budget)
                yield trace["prompt"], drafted, OracleDrafter(trajectory.lookup, 32)
                if runtime.order_model is not None:
                    yield trace["prompt"], drafted, runtime.spot_drafter(drafted)
                    uncoupled = replace(drafted, verifier="uncoupled", gamma=0.05)
                    yield trace["prompt"], uncoupled, runtime.spot_drafter(uncoupled)


def speculative_equality(
    runtime: Runtime, session: TargetSession, bundle: Bundle, budgets: tuple[int, ...], probe: dict[str, Any]
) -> Gate:
    """Drafted against draft-free decoding over budgets, temperatures, drafters and verifiers.

    Strict where the probe is; else every commit is audited at the draft-free shape with e = twice the largest logit
    difference that the probe saw.
    """
    runs = accepted = unequal = commits = near_ties = violations = 0
    controls: dict[Any, Result] = {}
    error = 2 * probe["max_abs"]
    draftable = bool(budgets[1:]) and bundle.manifest.decoding.block_width > 1
    planned = (
        run
        for sitting in range(MOST_SITTINGS if draftable else 0)
        if sitting == 0 or accepted < ENOUGH_ACCEPTED
        for run in _runs(runtime, bundle, budgets, 1000 * sitting)
    )
    for prompt, options, drafter in planned:
        key = (tuple(prompt), options.temperature, options.seed, options.whole)
        if key not in controls:
            controls[key] = runtime.generate(prompt, replace(options, budget=0))
        events = list(runtime.stream(prompt, options, drafter=drafter))
        result = events[-1].result  # type: ignore[union-attr]  # the last event is Finished
        runs += 1
        accepted += result.accepted
        commits += result.commits
        unequal += result.token_ids != controls[key].token_ids
        if not probe["strict"]:
            made = [(event.position, event.token) for event in events if isinstance(event, CommitEvent)]
            seen = audit(session, bundle.manifest.decoding, np.array(prompt), options, made, error)
            near_ties += seen.near_ties
            violations += seen.violations
    figures = {
        "runs": runs,
        "commits": commits,
        "accepted": accepted,
        "unequal": unequal,
        "strict": probe["strict"],
        "near_ties": near_ties,
        "violations": violations,
        "error": error,
    }
    enough = accepted >= ENOUGH_ACCEPTED or not draftable
    text = (
        "nothing can be drafted"
        if not draftable
        else f"{runs} runs, {accepted} drafts accepted, {unequal} texts differ"
    )
    if not enough:
        text += f"; fewer than {ENOUGH_ACCEPTED} accepted drafts prove nothing"
    if probe["strict"]:
        return Gate("equality", unequal == 0 and enough, text, figures)
    text += f"; audit of {commits} commits: {near_ties} near ties, {violations} not explained by them"
    return Gate("equality", violations == 0 and enough, text, figures)


def require(gate: Gate, backend: str) -> Gate:
    """The gate, if it passed.

    Raises:
        SpotDeployError: it did not (exit code 3).
    """
    if not gate.passed:
        raise SpotDeployError(
            f"gate-{gate.name}",
            f"the engine failed the gate {gate.name} on {backend}",
            seen=gate.text,
            fix="report this: the backend computes something else than the checkpoint",
            exit_code=VERIFICATION,
        )
    return gate


def verify_engine(
    bundle: Bundle,
    runtime: Runtime,
    session: TargetSession,
    *,
    precision: str,
    budgets: tuple[int, ...],
    requests: int,
    strict_before: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> list[Gate]:
    """All gates of an open engine, whether they pass or not; `strict_before`: its record says that it is bit-equal."""
    say("elementwise and argmax")
    gates = elementwise(bundle, session, precision)
    say("commit traces")
    gates.append(commit_traces(runtime, session, bundle, precision, gates[0].figures["allowed"]))
    say("isolation and joining")
    probe = invariance(bundle, session, budgets, requests)
    gates += invariance_gates(probe, precision, gates[0].figures["allowed"], strict_before=strict_before)
    say("speculative equality")
    gates.append(speculative_equality(runtime, session, bundle, budgets, probe))
    return gates
