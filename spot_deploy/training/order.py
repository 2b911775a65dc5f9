"""Training the order model on records (SPOT, section 3.1): cross-entropy of the commit that follows a hypothetical
prefix, at random anchors and depths.

What a drafter of left-to-right text was taught with (Teaching Diffusion to Speculate Left-to-Right, arXiv 2606.11552),
put to orders, measured no better (demo/README.md); its own setting, a diffusion drafter for an autoregressive target,
is not ours.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from spot_deploy.engines.contracts import Array
from spot_deploy.engines.errors import SpotDeployError, usage_error
from spot_deploy.export.order_model import OrderModel, load_order_model, save_order_model
from spot_deploy.runtime.features import OrderInputs, order_inputs
from spot_deploy.training.checkpoints import load_state, save_state
from spot_deploy.training.muon import Muon
from spot_deploy.training.records import DEPTHS, Records
from spot_deploy.training.schedule import set_learning_rate

DEPTH_DECAY = 0.85  # examples of depth d are drawn in proportion to .85^d, about how often that depth is reached
MATRIX_RATE = 10  # learning rate of matrices, whose updates are orthogonalised, over that of all else
HELD_OUT = 20  # every 20th block is kept for validation


@dataclass(frozen=True)
class TrainOptions:
    """Attributes: steps, batch (examples per step), learning_rate (peak, see schedule), seed, threads."""

    steps: int = 3000
    batch: int = 96
    learning_rate: float = 1e-3
    warmup: int = 100
    seed: int = 1
    threads: int = 1
    save_every: int = 250

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate <= 1 or not 0 <= self.seed < 2**63:
            raise usage_error(
                "options",
                "some options are out of range",
                seen=f"learning_rate {self.learning_rate}, seed {self.seed}",
                wanted="0 < learning_rate <= 1, 0 <= seed < 2^63",
                fix="mend them",
            )


@dataclass(frozen=True)
class Example:
    """Anchor pass, and how many commits after it the hypothetical prefix holds (depth 1 is the root alone)."""

    block: int
    step: int
    depth: int


def build(records: Records, examples: Sequence[Example]) -> tuple[OrderInputs, Array]:
    """Model inputs and labels (the position of the commit that follows the prefix) of some examples."""
    inputs, labels = [], []
    for example in examples:
        stale = records.stale(example.block, example.step)
        prefix = records.commits(range(example.step, example.step + example.depth))
        commits = example.step + example.depth - records.steps(example.block).start
        inputs.append(order_inputs(stale, [prefix], [records.candidate_odds(example.block, stale, commits)]))
        labels.append(int(records.index["position"][example.step + example.depth]))
    joined = OrderInputs(
        *(np.concatenate([getattr(i, name) for i in inputs]) for name in ("features", "state_id", "depth", "masked"))
    )
    return joined, np.array(labels)


def draw(records: Records, blocks: Array, rng: np.random.Generator, count: int) -> list[Example]:
    """Random examples from some blocks: anchors uniformly, depths by the decay."""
    starts = records.index["block_step"]
    lengths = starts[blocks + 1] - starts[blocks] - 1  # the last pass has nothing to predict
    cumulative = np.cumsum(lengths)
    examples = []
    for pick in rng.integers(0, cumulative[-1], count):
        index = int(np.searchsorted(cumulative, pick, side="right"))
        anchor = int(pick - (cumulative[index] - lengths[index]))
        weights = DEPTH_DECAY ** np.arange(1, int(lengths[index]) - anchor + 1)
        depth = 1 + int(rng.choice(len(weights), p=weights / weights.sum()))
        examples.append(Example(int(blocks[index]), int(starts[blocks[index]]) + anchor, depth))
    return examples


def scores(model: OrderModel, inputs: OrderInputs) -> torch.Tensor:
    """log q [N, L]."""
    names = ("features", "state_id", "depth", "masked")
    result: torch.Tensor = model(*(torch.from_numpy(getattr(inputs, name)) for name in names))
    return result


def validation_set(records: Records, blocks: Array, per_depth: int = 400) -> dict[int, list[Example]]:
    """The same examples every time, by depth."""
    rng = np.random.default_rng(7)
    found: dict[int, list[Example]] = {}
    for depth in DEPTHS:
        anchors = [
            Example(int(b), s, depth)
            for b in blocks
            for s in records.steps(int(b))
            if s + depth < records.steps(int(b)).stop
        ]
        if anchors:
            picked = rng.permutation(len(anchors))[:per_depth]
            found[depth] = [anchors[i] for i in picked]
    return found


@dataclass(frozen=True)
class Part:
    """Records of one block width, with the blocks to train on and examples of the blocks kept out, by depth."""

    records: Records
    blocks: Array
    held_out: dict[int, list[Example]]

    @classmethod
    def of(cls, records: Records) -> Part:
        usable = np.flatnonzero(np.diff(records.index["block_step"]) > 1)
        held_out = validation_set(records, usable[::HELD_OUT])
        return cls(records, np.delete(usable, np.s_[::HELD_OUT]), held_out)


def accuracy(model: OrderModel, parts: Sequence[Part]) -> dict[str, dict[str, float]]:
    """Next-commit accuracy and cross-entropy by depth, and the accuracy of ordering by stale confidence."""
    result = {}
    for depth in DEPTHS:
        found: list[Array] = []
        for part in parts:
            if depth in part.held_out:
                inputs, labels = build(part.records, part.held_out[depth])
                with torch.no_grad():
                    log_q = scores(model, inputs).numpy()
                confidence = np.where(inputs.masked, inputs.features[:, :, 35], -np.inf).argmax(-1)
                missing = -log_q[np.arange(len(labels)), labels]
                found.append(np.stack([log_q.argmax(-1) == labels, confidence == labels, missing]))
        if found:
            best, stale, loss = np.concatenate(found, axis=1)
            result[str(depth)] = {
                "model": float(best.mean()),
                "stale_confidence": float(stale.mean()),
                "cross_entropy": float(loss.mean()),
                "examples": len(best),
            }
    return result


def train(
    corpus: Sequence[Records],
    output: Path,
    options: TrainOptions,
    *,
    init: Path | None = None,
    progress: Callable[[int, str], None] = lambda done, note: None,
) -> dict[str, dict[str, float]]:
    """Train and write an order model; goes on from `output`/state.safetensors if that is there.

    Args:
        corpus: one for each block width; a batch comes from one of them, chosen in proportion to its passes.
        init: order model to start from (fine-tuning).

    Returns:
        Accuracy on the held-out blocks by depth.
    """
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    parts = [part for part in map(Part.of, corpus) if len(part.blocks)]
    if not parts:
        raise usage_error("records-few", "there are too few records to train on", fix="record more prompts")
    model = load_order_model(init)[0] if init is not None else OrderModel()
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if name.startswith("layers.") and parameter.ndim == 2 else others).append(parameter)
    optimizers = [
        Muon(matrices, lr=MATRIX_RATE * options.learning_rate),
        torch.optim.AdamW(others, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]
    output.mkdir(parents=True, exist_ok=True)
    state = output / "state.safetensors"
    commits = b"".join(r.index[name].tobytes() for r in corpus for name in ("position", "token"))
    run = f"{hashlib.sha256(commits).hexdigest()[:16]} batch {options.batch}"
    run += f" rate {options.learning_rate} seed {options.seed} init {init}"
    step = load_state(state, model, optimizers, run)
    shares = np.array([part.records.passes for part in parts], float)
    losses: list[float] = []
    result = accuracy(model.eval(), parts) if step >= options.steps else {}
    while step < options.steps:
        rng = np.random.default_rng([options.seed, step])
        part = parts[rng.choice(len(parts), p=shares / shares.sum())] if len(parts) > 1 else parts[0]
        inputs, labels = build(part.records, draw(part.records, part.blocks, rng, options.batch))
        for optimizer in optimizers:
            set_learning_rate(optimizer, step, steps=options.steps, warmup=options.warmup)
        log_q = scores(model.train(), inputs)
        loss = torch.nn.functional.nll_loss(log_q, torch.from_numpy(labels))
        if not math.isfinite(loss.item()):
            raise SpotDeployError(
                "training-diverged", f"the loss is {loss.item()} at step {step}", fix="use a smaller --learning-rate"
            )
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        losses.append(loss.item())
        if step % options.save_every == 0 or step == options.steps:
            save_state(state, model, optimizers, step, run)
            result = accuracy(model.eval(), parts)
            note: dict[str, object] = {
                "steps": step,
                "batch": options.batch,
                "learning_rate": options.learning_rate,
                "seed": options.seed,
                "block_widths": [part.records.width for part in parts],
                "training_blocks": sum(len(part.blocks) for part in parts),
                "training_passes": sum(part.records.passes for part in parts),
                "loss": round(float(np.mean(losses[-options.save_every :])), 4),
                "accuracy_by_depth": result,
            }
            save_order_model(model, output, note)
        mean = np.mean(losses[-50:])
        progress(
            step, f"loss {mean:.3f}" + (f", accuracy {result['1']['model']:.3f} at depth 1" if "1" in result else "")
        )
    return result
