"""Optimisation profiles: the shapes that an engine is made for, derived from the bundle's own numbers.

Three: `prefill` (clean blocks before the generation), `draft-free` (one state, or the two segments that open a block)
and `speculate` (up to 1 + the largest budget states), each over all prefix buckets. Targets with full attention have
`refresh` (one whole sequence) in the place of `prefill`. Backends that compile for shapes
(TensorRT) take them as they are; the others serve the same shapes, and the memory estimate goes by them. (One of each
for every bucket made TensorRT-RTX engines of the demo target eight times as large: 87 instead of 11 MB.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spot_deploy.engines.contracts import ITEMSIZE, MIN_ROWS, GraphSignature, TargetShape

Shape = tuple[int, ...]
Sizes = Mapping[str, tuple[int, int, int]]  # least, best, most by symbol of contracts


@dataclass(frozen=True)
class Limits:
    """What an engine shall serve.

    Attributes:
        block_width: positions per block, L.
        window: positions of a verified segment; more than a block where the one before it comes along.
        whole: positions of a pass over a whole sequence at most, where attention is full; 0: there are none.
        buckets: prefix sizes, rising.
        budgets: numbers of drafted states, rising from 0.
        budget: the one to optimise for.
        requests: requests in one pass at most.
        prefill_positions: positions of a prefill pass at most.
    """

    block_width: int
    buckets: tuple[int, ...]
    budgets: tuple[int, ...]
    budget: int
    requests: int
    prefill_positions: int
    window: int
    whole: int = 0

    def __post_init__(self) -> None:
        checks = {
            f"block_width {self.block_width} is below 1": self.block_width >= 1,
            f"buckets {self.buckets} do not rise from above 0": _rising(self.buckets) and self.buckets[0] > 0,
            f"budgets {self.budgets} do not rise from 0": _rising(self.budgets) and self.budgets[0] == 0,
            f"the budget {self.budget} is none of {self.budgets}": self.budget in self.budgets,
            f"requests {self.requests} is below 1": self.requests >= 1,
            f"prefill_positions {self.prefill_positions} is below the block width": self.prefill_positions
            >= self.block_width,
            f"window {self.window} is below the block width": self.window >= self.block_width,
        }
        bad = [text for text, right in checks.items() if not right]
        if bad:
            raise ValueError("; ".join(bad))

    @property
    def states(self) -> int:
        """States of a pass at most; two segments open a block."""
        return max(2, 1 + self.budgets[-1])


def _rising(numbers: Sequence[int]) -> bool:
    return bool(numbers) and list(numbers) == sorted(set(numbers))


@dataclass(frozen=True)
class Profile:
    """One optimisation profile: `symbols` gives (least, best, most) of R, S, Q, P, T and M (see contracts)."""

    role: str
    symbols: Sizes

    def shapes(self, shape: TargetShape) -> dict[str, tuple[Shape, Shape, Shape]]:
        """Least, best and largest shape of every input of the target graph, by name."""

        def fill(dims: Sequence[int | str], which: int) -> Shape:
            return tuple(d if isinstance(d, int) else self.symbols[d][which] for d in dims)

        return {
            spec.name: (fill(spec.shape, 0), fill(spec.shape, 1), fill(spec.shape, 2))
            for spec in shape.signature().inputs
        }


def target_profiles(limits: Limits) -> list[Profile]:
    """The profiles of the target graph, best for the middle bucket."""
    width, window = limits.block_width, limits.window
    longest = limits.prefill_positions // width * width
    first = ("refresh", (window, max(window, limits.whole // 2), limits.whole))
    if not limits.whole:
        first = ("prefill", (width, longest, longest))
    roles = {
        first[0]: ((1, 1, 1), first[1]),
        "draft-free": ((1, 1, 2), (window, window, window)),
        "speculate": ((1, 1 + limits.budget, limits.states), (window, window, window)),
    }
    buckets = limits.buckets
    profiles = []
    for role, (states, positions) in roles.items():
        rows = (MIN_ROWS, MIN_ROWS, max(MIN_ROWS, limits.requests))
        if role == "refresh":
            rows = (MIN_ROWS, max(MIN_ROWS, width), max(MIN_ROWS, limits.requests * width))
        elif role != "prefill":
            best, most = states[1] * width, limits.requests * states[2] * width
            rows = (MIN_ROWS, max(MIN_ROWS, best), max(MIN_ROWS, most))
        symbols = {
            "R": (1, 1, limits.requests),
            "S": states,
            "Q": positions,
            "P": (buckets[0], buckets[(len(buckets) - 1) // 2], buckets[-1]),
            "T": (1, 1, 1),
            "M": rows,
        }
        profiles.append(Profile(role, symbols))
    return profiles


def spanning(profiles: Iterable[Mapping[str, Any]]) -> Sizes:
    """(least, best, most) by symbol over all profiles, as a record holds them; N is that of the order model.

    The best is that of the last profile, `speculate`.
    """
    found = [p["symbols"] for p in profiles]
    span = {s: (min(p[s][0] for p in found), found[-1][s][1], max(p[s][2] for p in found)) for s in found[0]}
    return span | {"N": (1, span["S"][1], span["R"][2] * span["S"][2])}


def buffer_bytes(signature: GraphSignature, largest: Iterable[Mapping[str, Shape]]) -> int:
    """Bytes of buffers that hold all inputs and outputs of every pass: one prefix, and what one pass needs.

    Args:
        largest: by profile, the largest shape of every input; axes of outputs are as long as those of inputs.
    """
    sizes = symbol_sizes(signature, largest)
    return sum(
        ITEMSIZE[t.dtype] * math.prod(d if isinstance(d, int) else sizes[d] for d in t.shape)
        for t in (*signature.inputs, *signature.outputs)
    )


def symbol_sizes(signature: GraphSignature, largest: Iterable[Mapping[str, Shape]]) -> dict[str, int]:
    """The most that every free axis takes; arguments as `buffer_bytes`."""
    sizes: dict[str, int] = {}
    for shapes in largest:
        for spec in signature.inputs:
            for symbol, size in zip(spec.shape, shapes[spec.name], strict=True):
                if isinstance(symbol, str):
                    sizes[symbol] = max(sizes.get(symbol, 0), size)
    return sizes


def order_profile(limits: Limits) -> tuple[int, int, int]:
    """(least, best, most) states of an order model call."""
    return (1, 1 + limits.budget, limits.requests * limits.states)
