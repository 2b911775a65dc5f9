"""The learning rate of every training loop here."""

from __future__ import annotations

import math

import torch


def set_learning_rate(optimizer: torch.optim.Optimizer, peak: float, step: int, *, steps: int, warmup: int) -> float:
    """Linear warm-up to `peak`, then a cosine down to 2 % of it; sets and returns the rate of a step."""
    warm = min(1.0, (step + 1) / warmup)
    rate = peak * warm * (0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate
