"""Training state on disk as safetensors: weights, Adam moments, step. No pickle."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

MOMENTS = ("exp_avg", "exp_avg_sq")


def save_state(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write atomically."""
    tensors = {f"model.{name}": p.detach().contiguous() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key in MOMENTS:
            tensors[f"{key}.{name}"] = optimizer.state[parameter][key]
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary, metadata={"step": str(step)})
    temporary.replace(path)


def load_state(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Read what `save_state` wrote into model and optimizer; returns the step."""
    with safe_open(path, "pt") as file:
        step = int(file.metadata()["step"])
    tensors = load_file(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
            moments = {key: tensors[f"{key}.{name}"] for key in MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    return step
