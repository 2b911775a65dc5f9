"""The draft tree: grown by prefix mass, in waves (SPOT, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spot_deploy.engines.contracts import Array
from spot_deploy.runtime.state import Commit


@dataclass(frozen=True)
class Node:
    """A drafted state.

    Attributes:
        parent: index of the parent among the nodes; -1 for the root. Parents come before children.
        path: the commits that lead here from the root; the last one is the node's own.
        mass: the drafter's probability that the target passes through this state.
    """

    parent: int
    path: tuple[Commit, ...]
    mass: float


@dataclass(frozen=True)
class Candidates:
    """Tokens to draft at one depth: rows are the positions that were masked in the stale pass.

    Attributes:
        positions: [M].
        tokens: [M, 2], the second one only where its weight is above zero.
        weights: [M, 2], probability of each given that its position commits next.
        log_odds: of the first token, by which the target orders positions [M].
    """

    positions: Array
    tokens: Array
    weights: Array
    log_odds: Array


@dataclass
class _Grown:
    serial: int
    parent: int  # serial of the parent, -1 for the root
    path: tuple[Commit, ...]
    mass: float
    expanded: bool = False


def grow(
    budget: int,
    floor: float,
    depth_limit: int,
    order: Callable[[Sequence[tuple[Commit, ...]]], Array],
    candidates: Callable[[int], Candidates],
) -> list[Node]:
    """The `budget` states of largest mass, parents before children.

    Best-first growth would call the order model once per state. Here every member of the current best `budget` that has
    no children yet is expanded in one batched call, and the best are chosen anew, until nothing changes: the same tree,
    since whatever is left out descends from a state whose mass is no larger than the last one kept.

    Args:
        budget: states to draft at most.
        floor: states of less mass are dropped (SPOT-gamma).
        depth_limit: longest path; a drafted state must leave a position masked.
        order: probabilities of the next position [N, L] for N paths from the root, 0 where not masked.
        candidates: tokens to draft as commit number d + 1 after the root.
    """
    pool: list[_Grown] = []
    frontier = [_Grown(-1, -1, (), 1.0)]
    serial = 0
    while frontier:
        grown = []
        for node, q in zip(frontier, order([node.path for node in frontier]), strict=True):
            node.expanded = True
            offer = candidates(len(node.path))
            mass = node.mass * q[offer.positions][:, None] * offer.weights
            least = max(floor, pool[-1].mass if len(pool) == budget else 0.0)
            flat = np.flatnonzero((mass >= least) & (mass > 0))
            for index in flat[np.argsort(-mass.flat[flat], kind="stable")][:budget]:
                row, column = divmod(int(index), 2)
                commit = Commit(int(offer.positions[row]), int(offer.tokens[row, column]))
                grown.append(_Grown(serial, node.serial, (*node.path, commit), float(mass[row, column])))
                serial += 1
        pool = sorted([*pool, *grown], key=lambda node: (-node.mass, node.serial))[:budget]
        # The last of a full pool cannot have a child that displaces anything.
        open_nodes = pool[:-1] if len(pool) == budget else pool
        frontier = [node for node in open_nodes if not node.expanded and len(node.path) < depth_limit]
    index_of = {node.serial: i for i, node in enumerate(pool)} | {-1: -1}
    return [Node(index_of[node.parent], node.path, node.mass) for node in pool]


def grow_chain(
    budget: int,
    floor: float,
    depth_limit: int,
    order: Callable[[Sequence[tuple[Commit, ...]]], Array],
    candidates: Callable[[int], Candidates],
) -> list[Node]:
    """The chain of the likeliest commits, one after another; arguments as `grow`."""
    nodes: list[Node] = []
    path: tuple[Commit, ...] = ()
    mass = 1.0
    while len(nodes) < min(budget, depth_limit):
        offer = candidates(len(path))
        masses = mass * order([path])[0][offer.positions][:, None] * offer.weights
        row, column = divmod(int(masses.argmax()), 2)
        mass = float(masses[row, column])
        if mass < floor or mass <= 0:
            break
        path = (*path, Commit(int(offer.positions[row]), int(offer.tokens[row, column])))
        nodes.append(Node(len(nodes) - 1, path, mass))
    return nodes
