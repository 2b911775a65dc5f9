"""The learning rate of every training loop here."""

from __future__ import annotations

import torch

DECAY = 0.25  # share of the steps over which the rate falls


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, *, steps: int, warmup: int) -> float:
    """Set the rate of a step: linear warm-up, a constant rate, a linear fall to zero. Returns the share of the peak.

    The peak is the rate that the optimizer was made with. The constant part lets a run be prolonged: until the fall
    begins, its states do not depend on `steps`.
    """
    factor = min(1.0, (step + 1) / warmup, (steps - step) / max(1.0, DECAY * steps))
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
    return factor
