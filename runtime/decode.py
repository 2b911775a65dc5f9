"""The decode loop: draft, verify, commit. Draft-free decoding is the same loop with a budget of 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from spot_deploy.engines.contracts import Array
from spot_deploy.engines.errors import usage_error
from spot_deploy.runtime import rejection
from spot_deploy.runtime.drafters import Drafter, Round
from spot_deploy.runtime.head import Head
from spot_deploy.runtime.manifest import HEDGE_WEIGHTS, MAX_BUDGET, Decoding
from spot_deploy.runtime.noise import Noise
from spot_deploy.runtime.sampler import next_state
from spot_deploy.runtime.state import Commit, State
from spot_deploy.runtime.target import RequestTarget
from spot_deploy.runtime.tree import Node

VERIFIERS = ("coupled", "uncoupled", "greedy", "rejection")


@dataclass(frozen=True)
class DecodeOptions:
    """How to decode one prompt. `None` takes the bundle's default.

    Attributes:
        max_new_tokens: positions to generate at most; the last block is always filled.
        temperature: 0 takes the largest logit; above, exact draws from softmax(logits / T).
        seed, sample: address the noise; the same pair gives the same text for every drafter and budget.
        budget: drafted states per pass, D. 0 is draft-free decoding.
        gamma: mass floor; drafts of less mass are dropped.
        tau: temperature of the order model's scores.
        hedge_gate: a second token is drafted where the stale top probability is below it.
        hedge_weights: `normalised`, `raw` or `none` (see SpotDrafter).
        verifier: `coupled` (exact), `uncoupled` (exact; drafts ignore the noise), `greedy` (accepts largest logits:
            not exact at T > 0), `rejection` (of sampled chains; exact in law, not the draft-free text of the seed).
        ignore_eos: generate the full length, past stop ids.
        padded: give every verification pass the shape of a full budget.
        fuse: open blocks by a two-segment pass; False uses a store pass and an opening, another engine mode.
        draft_tail: see SpotDrafter.
        sequential: verify states one at a time (for telling logic errors from kernel effects).
        whole: for targets with full attention: every pass runs whole sequences, exact, in place of a frozen cache.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    sample: int = 0
    budget: int | None = None
    gamma: float | None = None
    tau: float | None = None
    hedge_gate: float | None = None
    hedge_weights: str | None = None
    verifier: str = "coupled"
    ignore_eos: bool = False
    padded: bool = False
    fuse: bool = True
    draft_tail: bool = False
    sequential: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        def number(name: str, low: float, high: float, kind: type = float) -> bool:
            value = getattr(self, name)
            if value is None and name in ("budget", "gamma", "tau", "hedge_gate"):
                return True
            right = isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
            return right and low <= value <= high

        checks = {
            "max_new_tokens must be a whole number of at least 1": number("max_new_tokens", 1, 2**31, int),
            "temperature must be 0, or within 0.01..100": self.temperature == 0 or number("temperature", 0.01, 100),
            "seed must be a whole number within 0..2^64-1": number("seed", 0, 2**64 - 1, int),
            "sample must be a whole number within 0..2^32-1": number("sample", 0, 2**32 - 1, int),
            f"budget must be a whole number within 0..{MAX_BUDGET}": number("budget", 0, MAX_BUDGET, int),
            "gamma must be a number of at least 0": number("gamma", 0, 1e9),
            "tau must be within 0.01..100": number("tau", 0.01, 100),
            "hedge_gate must be within 0..1": number("hedge_gate", 0, 1),
            f"hedge_weights must be one of {', '.join(HEDGE_WEIGHTS)}": self.hedge_weights in (None, *HEDGE_WEIGHTS),
            "rejection is for temperatures above 0": self.verifier != "rejection" or self.temperature != 0,
            f"verifier must be one of {', '.join(VERIFIERS)}": self.verifier in VERIFIERS,
        }
        bad = [text for text, right in checks.items() if not right]
        if bad:
            seen = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name in " ".join(bad))
            raise usage_error(
                "options", "some options are out of range", seen=seen, wanted="; ".join(bad), fix="mend them"
            )

    @property
    def exact(self) -> bool:
        """Whether the law of the output is the target's own."""
        return self.verifier != "greedy" or self.temperature == 0


@dataclass
class Figures:
    """What a run did.

    Attributes:
        nfe: denoise passes (the paper's count). RequestTarget counts prefill and store passes apart, and says how many
            of the denoise passes refreshed a frozen cache.
        given: first tokens of blocks that came from a store pass.
        commits: everything committed, `nfe + accepted + given`.
        accepted: drafted states that were accepted; `accepted_per_round` by drafted round.
        rounds: passes that verified a root and its drafts (all but the openings).
        drafted: states drafted.
        rejections: why drafted rounds ended: `position` (the true position was not drafted there), `token` (it was, its
            token not), `budget` (nothing was drafted after the last accepted state), `edge` (the block was full).
        phases: seconds by phase: `prefill` and `target` inside the engine, `draft` in the drafter (order model
            included), `host` everything else.
    """

    nfe: int = 0
    given: int = 0
    commits: int = 0
    accepted: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted_per_round: list[int] = field(default_factory=list)
    rejections: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("position", "token", "budget", "edge"), 0)
    )
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("prefill", "target", "draft", "host"), 0.0))


@dataclass(frozen=True)
class CommitEvent:
    """One commit: absolute position, token id, whether it was an accepted draft."""

    position: int
    token: int
    drafted: bool


Observer = Callable[[State, Head, Commit], None]


@dataclass(frozen=True)
class Verified:
    """Where the walk over a verified tree ended: the last verified state, its index, and what comes after it."""

    index: int
    state: State
    head: Head
    successor: State
    commit: Commit


def decode(
    target: RequestTarget,
    decoding: Decoding,
    prompt: Array,
    options: DecodeOptions,
    drafter: Drafter | None,
    figures: Figures,
    observe: Observer | None = None,
) -> Iterator[CommitEvent]:
    """Commit until the length is reached or a block holds a stop id.

    Args:
        target: the target's passes for this request, not begun yet.
        prompt: token ids [P], at least one.
        options: resolved (Runtime.resolve): nothing is None.
        drafter: who drafts; not asked where the budget is 0.
        figures: counted into.
        observe: called with every state on the path, the target's output for it, and its commit.
    """
    width, budget = decoding.block_width, options.budget or 0
    noise = Noise(options.seed, options.sample) if options.temperature > 0 else None
    target.begin(prompt, options.max_new_tokens)
    figures.phases["prefill"] = target.seconds
    origin = decoding.origin(len(prompt))
    for block in decoding.blocks(len(prompt), options.max_new_tokens):
        start = origin + block * width
        given = prompt[start : start + width]
        state = State.opened(block, given, width, decoding.mask_id)
        if decoding.given_start and not len(given):
            # Not observed, and no commit of the block: its output is for one position, from which nothing is drafted.
            _, commit = _advance(state, target.first_token(), noise, figures, None)
            figures.given += 1
            yield CommitEvent(start, commit.token, False)
            given = np.array([commit.token])
            state = State.opened(block, given, width, decoding.mask_id)
        head = target.open(state)
        figures.nfe += 1
        root, commit = _advance(state, head, noise, figures, observe)
        yield CommitEvent(start + commit.position, commit.token, False)
        while len(root.masked):
            drafts: list[Node] = []
            if drafter is not None and budget and len(root.masked) > 1:
                began = time.perf_counter()
                coupled = noise if options.verifier in ("coupled", "rejection") else None
                drafts = drafter.draft(Round(state, head, commit, root, budget, coupled))
                figures.phases["draft"] += time.perf_counter() - began
            states = [root, *(root.after(*node.path) for node in drafts)]
            batches = [[s] for s in states] if options.sequential else [states]
            heads = [head for batch in batches for head in target.verify(batch, budget)]
            figures.nfe += 1
            figures.rounds += 1
            if options.verifier == "rejection" and noise is not None:
                accepted, end = _reject(states, drafts, heads, noise, figures, observe)
            else:
                accepted, end = _walk(states, heads, noise, options.verifier, figures, observe)
            for taken in accepted:
                yield CommitEvent(start + taken.position, taken.token, True)
            if drafts:
                figures.drafted += len(drafts)
                figures.accepted_per_round.append(len(accepted))
                figures.rejections[why_ended(drafts, end.index, end.commit, end.successor)] += 1
            state, head, root, commit = end.state, end.head, end.successor, end.commit
            yield CommitEvent(start + commit.position, commit.token, False)
        target.finish(root.tokens)
        generated = root.tokens[max(0, len(prompt) - start) :]
        if not options.ignore_eos and np.isin(generated, decoding.stop_ids).any():
            return


def _advance(
    state: State, head: Head, noise: Noise | None, figures: Figures, observe: Observer | None
) -> tuple[State, Commit]:
    successor, commit = next_state(state, head, noise)
    figures.commits += 1
    if observe is not None:
        observe(state, head, commit)
    return successor, commit


def _walk(
    states: list[State],
    heads: list[Head],
    noise: Noise | None,
    verifier: str,
    figures: Figures,
    observe: Observer | None,
) -> tuple[list[Commit], Verified]:
    """Follow `next_state` from the root for as long as it leads to a verified state, found by content."""
    index_of: dict[bytes, int] = {}
    for index, state in enumerate(states):
        index_of.setdefault(state.key, index)
    accepted: list[Commit] = []
    here = 0
    while True:
        if verifier == "greedy" and noise is not None:
            # Accept what the largest logits lead to; only the commit that ends the round is sampled.
            accepts = next_state(states[here], heads[here], None)[0].key in index_of
            drawn = None if accepts else noise
            successor, commit = _advance(states[here], heads[here], drawn, figures, observe)
            if not accepts:
                break
        else:
            successor, commit = _advance(states[here], heads[here], noise, figures, observe)
            if successor.key not in index_of:
                break
        here = index_of[successor.key]
        accepted.append(commit)
        figures.accepted += 1
    return accepted, Verified(here, states[here], heads[here], successor, commit)


def _reject(
    states: list[State],
    drafts: list[Node],
    heads: list[Head],
    noise: Noise,
    figures: Figures,
    observe: Observer | None,
) -> tuple[list[Commit], Verified]:
    """As `_walk`, by rejection sampling."""

    def advance(index: int, commit: Commit) -> None:
        figures.commits += 1
        if observe is not None:
            observe(states[index], heads[index], commit)

    accepted, here, commit = rejection.walk(states, drafts, heads, noise, advance)
    figures.accepted += len(accepted)
    return accepted, Verified(here, states[here], heads[here], states[here].after(commit), commit)


def why_ended(drafts: Sequence[Node], last: int, commit: Commit, successor: State) -> str:
    """Reason that the walk went no further (see Figures.rejections).

    Args:
        last: the last verified state on the path: 0 is the root, i + 1 is draft i; `commit` leads to its `successor`.
    """
    if not len(successor.masked):
        return "edge"
    here = frozenset(drafts[last - 1].path) if last else frozenset[Commit]()
    beyond = [node.path for node in drafts if len(node.path) == len(here) + 1 and here.issubset(node.path)]
    tried = [added.position for path in beyond for added in frozenset(path) - here]
    if not tried:
        return "budget"
    return "token" if commit.position in tried else "position"
