"""The draft tree: grown by prefix mass, in waves (SPOT, section 3.2), with equal states merged."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spot_deploy.engines.contracts import Array
from spot_deploy.runtime.state import Commit

# What makes a state one: the set of its commits; where equal states are not merged, their order.
_Key = frozenset[Commit] | tuple[Commit, ...]


@dataclass(frozen=True)
class Node:
    """A drafted state.

    Attributes:
        parent: index of the parent among the nodes, of the first chosen if there are several; -1 for the root.
            Parents come before children.
        path: the commits that lead here from the root by that parent; the last one is the node's own.
        mass: the drafter's probability that the target passes through this state by way of drafted ones.
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


def grow(
    budget: int,
    floor: float,
    depth_limit: int,
    order: Callable[[Sequence[tuple[Commit, ...]]], Array],
    candidates: Callable[[int], Candidates],
    merge: bool = True,
) -> list[Node]:
    """The `budget` states of largest mass, parents before children.

    The order model gives a state's children; states are chosen best first. To call it once per wave and not once per
    state, the choice is made with the children that are known, what of it has none yet is expanded in one batched call,
    and the choice is made anew, until it stands.

    Different orders of the same commits lead to one state. With `merge` it is drafted once, and its mass is the sum
    over the parents that are drafted (beyond the paper; Spiffy, arXiv 2509.18085, merges so in its graphs). Of a state
    its `budget` likeliest children are looked at, no more.

    Args:
        budget: states to draft at most.
        floor: states of less mass are dropped (SPOT-gamma).
        depth_limit: longest path; a drafted state must leave a position masked.
        order: probabilities of the next position [N, L] for N paths from the root, 0 where not masked.
        candidates: tokens to draft as commit number d + 1 after the root.
        merge: False for the paper's tree, in which every path is a state of its own.
    """

    def key_of(path: tuple[Commit, ...]) -> _Key:
        return frozenset(path) if merge else path

    children: dict[_Key, list[tuple[_Key, Commit, float]]] = {}
    wave: list[tuple[Commit, ...]] = [()]
    while wave:
        for path, q in zip(wave, order(wave), strict=True):
            offer = candidates(len(path))
            shares = q[offer.positions][:, None] * offer.weights
            flat = np.flatnonzero(shares > 0)
            children[key_of(path)] = found = []
            for index in flat[np.argsort(-shares.flat[flat], kind="stable")][:budget].tolist():
                row, column = divmod(index, 2)
                commit = Commit(int(offer.positions[row]), int(offer.tokens[row, column]))
                found.append((key_of((*path, commit)), commit, float(shares[row, column])))
        nodes = _choose(budget, floor, key_of(()), children)
        open_ones = nodes
        if len(nodes) == budget and not any(frozenset(nodes[-1].path) < frozenset(node.path) for node in nodes):
            open_ones = nodes[:-1]  # no child of the last can displace anything
        paths = (node.path for node in open_ones if len(node.path) < depth_limit)
        wave = [path for path in paths if key_of(path) not in children]
    return nodes


def _choose(
    budget: int, floor: float, root: _Key, children: dict[_Key, list[tuple[_Key, Commit, float]]]
) -> list[Node]:
    """Best first among the states that have a parent among those chosen before them."""
    mass: dict[_Key, float] = {}
    parent: dict[_Key, tuple[int, tuple[Commit, ...]]] = {}
    chosen: dict[_Key, tuple[int, tuple[Commit, ...]]] = {root: (-1, ())}
    heap: list[tuple[float, int, _Key]] = []
    serial = itertools.count()  # the first comes first among equals

    def spread(key: _Key, more: float) -> None:
        """Let mass that reaches a chosen state flow on to its children."""
        index, path = chosen[key]
        for child, commit, share in children.get(key, ()):
            mass[child] = mass.get(child, 0.0) + more * share
            parent.setdefault(child, (index, (*path, commit)))
            if child in chosen:
                spread(child, more * share)
            else:
                heapq.heappush(heap, (-mass[child], next(serial), child))

    spread(root, 1.0)
    while heap and len(chosen) <= budget:
        negative, _, key = heapq.heappop(heap)
        if key not in chosen and -negative == mass[key] and mass[key] >= floor:
            chosen[key] = (len(chosen) - 1, parent[key][1])
            spread(key, mass[key])
    return [Node(*parent[key], mass[key]) for key in list(chosen)[1:]]


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
