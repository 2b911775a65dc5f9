"""The cost c(S) = t(S) / t(1) of a pass over S states on an open engine, and what follows from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spot_deploy.engines.contracts import TargetSession
from spot_deploy.runtime.manifest import Decoding
from spot_deploy.runtime.state import State
from spot_deploy.runtime.target import BlockCausalTarget

MASKS = ("half", "all")


@dataclass(frozen=True)
class CurveOptions:
    """What to time.

    Attributes:
        states: numbers of states; 1 is always among them.
        masks: `half`: a random quarter to three quarters of every state is masked, half on average, also where there is
            one state, as in decoding; `all`: everything is masked, the dearest pass.
        repeats: of every pass at most; `seconds`: no further repeat begins after them.
        short_warm_up: warm up with the smallest and the largest pass alone.
    """

    states: Sequence[int]
    masks: Sequence[str] = ("half",)
    repeats: int = 15
    seconds: float = 60.0
    short_warm_up: bool = False


def cost_curves(
    session: TargetSession, decoding: Decoding, width: int, prefix: int, budgets: Sequence[int], options: CurveOptions
) -> dict[str, Any]:
    """Engine seconds of passes over S states of `width` positions, in a prefix bucket filled to three quarters.

    Passes of all shapes take turns, so that drift of the machine meets all of them. The block width is a free symbol of
    the graph, so an engine that opens the ONNX file serves all.
    """
    decoding = replace(
        decoding,
        block_width=width,
        max_positions=prefix,
        buckets=(prefix,),
        prefill_positions=max(width, min(decoding.prefill_positions, prefix)),
    )
    rng = np.random.default_rng(0)
    target = BlockCausalTarget(session, decoding, 0.0)
    filled = max(width, min(prefix * 3 // 4, prefix - width) // width * width)
    target.prefill(rng.integers(0, decoding.mask_id, filled))
    block = filled // width

    def state(masked: int) -> State:
        tokens = rng.integers(0, decoding.mask_id, width)
        tokens[rng.permutation(width)[:masked]] = decoding.mask_id
        return State(block, tokens, decoding.mask_id)

    def engine_seconds(run: Callable[[], object]) -> float:
        target.cache.length, before = filled, target.seconds
        run()
        return float(target.seconds - before)

    def verify(kind: str, count: int) -> float:
        low, high = (width // 4, width - width // 4) if kind == "half" else (width, width)
        states = [state(max(1, int(rng.integers(low, high + 1)))) for _ in range(count)]
        return engine_seconds(lambda: target.verify(states, count - 1))

    def opening() -> float:
        finished, fresh = state(0).tokens, replace(state(width), block=block + 1)
        target.finish(finished)
        return engine_seconds(lambda: target.open(fresh))

    shapes = [(kind, count) for kind in options.masks for count in sorted({1, *options.states})]
    seen: dict[tuple[str, int], list[float]] = {shape: [] for shape in shapes}
    opened: list[float] = []
    # Where passes are recorded, the second one of a shape is the recording.
    for _ in range(3 if session.fixed_shapes else 1):
        for shape in (shapes[0], shapes[-1]) if options.short_warm_up else shapes:
            verify(*shape)
        opening()
    began = time.perf_counter()
    for done in range(options.repeats):
        if done and time.perf_counter() - began > options.seconds:
            break
        for shape in shapes:
            seen[shape].append(verify(*shape))
        opened.append(opening())
    curves = {}
    for kind in options.masks:
        single = float(np.median(seen[kind, 1]))
        curves[kind] = {
            str(count): {"seconds": spread(seen[kind, count]), "c": float(np.median(seen[kind, count])) / single}
            for kind_, count in shapes
            if kind_ == kind
        }
    found = {
        "width": width,
        "prefix_bucket": prefix,
        "prefix_filled": filled,
        "repeats": len(opened),
        "opening": spread(opened),
        "curves": curves,
    }
    most = max(count for _, count in shapes)
    return found | {"ceiling": {str(b): ceiling(found, b) for b in budgets if 0 < b < most}}


def pass_seconds(curve: Mapping[str, Any], states: int) -> float:
    """Median time of a pass over `states`, between measured sizes by a straight line."""
    points = next(iter(curve["curves"].values()))  # `half` where it was measured
    return float(np.interp(states, [int(s) for s in points], [p["seconds"]["median"] for p in points.values()]))


def ceiling(curve: Mapping[str, Any], budget: int) -> float:
    """Gain on a block if every draft were right: r masked positions take one pass over min(budget + 1, r) states."""
    single, left, drafted = pass_seconds(curve, 1), curve["width"] - 1, 0.0
    plain = curve["opening"]["median"] + left * single
    while left:
        states = min(budget + 1, left)
        drafted += pass_seconds(curve, states)
        left -= states
    return float(plain / (curve["opening"]["median"] + drafted))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and extremes."""
    names = ("min", "q1", "median", "q3", "max")
    return {name: float(v) for name, v in zip(names, np.percentile(values, (0, 25, 50, 75, 100)), strict=True)}
