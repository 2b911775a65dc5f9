"""Training state on disk as safetensors: weights, the optimizers' moments, step. No pickle."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.engines.files import atomic_path

Optimizers = list[torch.optim.Optimizer]


def save_state(path: Path, model: torch.nn.Module, optimizers: Optimizers, step: int, run: str) -> None:
    """Write atomically. `run` tells what is being trained on what; only the same run goes on from this file."""
    tensors = {f"model.{name}": p.detach().contiguous() for name, p in model.named_parameters()}
    names = {id(p): name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            tensors |= {f"{key}.{names[id(parameter)]}": value for key, value in state.items()}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"step": str(step), "run": run})


def load_state(path: Path, model: torch.nn.Module, optimizers: Optimizers, run: str) -> int:
    """Read what `save_state` wrote into model and optimizers; returns the step, 0 if there is no file.

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
    owner = {id(p): o for o in optimizers for group in o.param_groups for p in group["params"]}
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for key, value in tensors.items():
            kind, name = key.split(".", 1)
            parameter = parameters[name]
            if kind == "model":
                parameter.copy_(value)
            else:
                owner[id(parameter)].state[parameter][kind] = value
    return int(metadata["step"])
