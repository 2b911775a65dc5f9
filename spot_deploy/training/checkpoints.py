"""Training state on disk as safetensors: weights, Adam moments, step. No pickle."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.engines.files import atomic_path

MOMENTS = ("exp_avg", "exp_avg_sq")


def save_state(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, run: str) -> None:
    """Write atomically. `run` tells what is being trained on what; only the same run goes on from this file."""
    tensors = {f"model.{name}": p.detach().contiguous() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key in MOMENTS:
            tensors[f"{key}.{name}"] = optimizer.state[parameter][key]
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"step": str(step), "run": run})


def load_state(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, run: str) -> int:
    """Read what `save_state` wrote into model and optimizer; returns the step, 0 if there is no file.

    Raises:
        SpotDeployError: the file is damaged, or belongs to another run.
    """
    if not path.exists():
        return 0
    fix = f"delete {path} to start anew, or choose another folder"
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        tensors = load_file(path)
    except SafetensorError as error:
        raise SpotDeployError("training-state", f"cannot read {path}", seen=str(error), fix=fix) from error
    if metadata.get("run") != run:
        raise SpotDeployError(
            "training-state",
            f"{path} belongs to another training run",
            seen=str(metadata.get("run")),
            wanted=run,
            fix=fix,
        )
    step = int(metadata["step"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
            moments = {key: tensors[f"{key}.{name}"] for key in MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    return step
