"""Order models as others publish them: PyTorch `.pt` files (huggingface.co/EliezerS/SPOT-dLLM, MIT), to our form.

A file holds tensors under names that we do not know. Each of our parameters takes the one tensor of its shape, layer
and kind; where several have those, their names decide. What a feature means is not in the file: only a measurement
(`eval-drafter`) shows whether a model that fits was trained on features like ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.export.order_model import OrderModel

LEAST_TENSORS = 8  # a mapping with fewer is no network
# How others call our modules; asked only where shapes leave a choice.
NAMES = {
    "norm1": r"norm_?1|ln_?1|attn_norm|norm_attn",
    "norm2": r"norm_?2|ln_?2|ffn?_norm|mlp_norm|norm_ffn?",
    "out": r"out_proj|attn\.out|o_proj|proj_out|attn\.proj|\bout\b",
    "down": r"linear2|fc2|down|w2|(?:mlp|ffn?)\.[23]",
    "features": r"feat|input|stale|(?:^|\.)in_proj|embed_x",
    "norm": r"^(?!.*layers?\.).*(?:norm|ln)",
    "position": r"^(?!.*(?:head|score|logit)).*pos",
    "score1": r"head|score|logit|mlp_out|classifier",
    "state": r"state|status|kind|flag",
    "depth": r"depth|step",
}


def import_order_model(path: Path) -> tuple[OrderModel, dict[str, str]]:
    """Read a `.pt` file; nothing but tensors is ever unpickled.

    Returns:
        The model, and which published tensor each of our parameters was taken from.

    Raises:
        SpotDeployError: no such file, no tensors in it, something in it is no plain data, or shapes do not fit.
    """
    tensors = _read(path)
    model = OrderModel()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    left, taken = dict(tensors), dict[str, str]()
    for own, shape in shapes.items():
        fitting = [name for name, t in left.items() if tuple(t.shape) == shape and _alike(own, name)]
        # Where several of ours could take it, its name must tell; being the last one left would prove nothing.
        if sum(other == shape and _alike(own, name) for name, other in shapes.items()) > 1:
            module = own.split(".")[-2]
            pattern = NAMES.get(module, re.escape(module))
            fitting = [name for name in fitting if re.search(pattern, name, re.IGNORECASE)]
        if len(fitting) == 1:
            taken[own] = fitting[0]
            del left[fitting[0]]
    open_ = {own: shape for own, shape in shapes.items() if own not in taken}
    if open_ or left:
        raise SpotDeployError(
            "drafter-shapes",
            f"{path.name} is no order model of the published size",
            seen="in the file, without a place: "
            + (_listed({n: tuple(t.shape) for n, t in left.items()}) or "nothing"),
            wanted="still to be filled: " + (_listed(open_) or "nothing"),
            fix="give a file of 3 layers, d 128, 8 heads, top 32; or train one (record, train-drafter)",
        )
    with torch.no_grad():
        for own, parameter in model.named_parameters():
            parameter.copy_(tensors[taken[own]])
    return model.eval(), taken


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    shown = [f"{name} {list(shape)}" for name, shape in list(shapes.items())[:12]]
    return (", ".join(shown) or "nothing") + (f" and {len(shapes) - 12} more" if len(shapes) > 12 else "")


def _alike(own: str, name: str) -> bool:
    """Same kind (weight or bias), and the same layer."""
    if own.endswith("bias") != name.endswith("bias"):
        return False
    mine = re.search(r"layers\.(\d+)\.", own)
    theirs = re.search(r"(?:^|\.)(?:layers?|blocks?|encoder|h)\.(\d+)\.", name)
    return (mine and mine[1]) == (theirs and theirs[1])


def _read(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise SpotDeployError("drafter-missing", f"there is no file {path}", fix="give a downloaded .pt file")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can make the unpickler raise anything
        raise SpotDeployError(
            "drafter-unreadable",
            f"{path.name} cannot be read as tensors alone",
            seen=f"{type(error).__name__}: {error}".strip().splitlines()[0][:200],
            wanted="a PyTorch file of plain tensors; nothing else is ever unpickled",
            fix="save the state dict alone, or download the file again",
        ) from error
    try:
        networks = {where: found for where, found in _networks(content, "") if len(found) >= LEAST_TENSORS}
    except RecursionError as error:
        raise SpotDeployError(
            "drafter-content",
            f"{path.name} holds itself",
            seen="a mapping inside itself",
            fix="save the state dict alone",
        ) from error
    if len(networks) != 1:
        raise SpotDeployError(
            "drafter-content",
            f"{path.name} does not hold one network",
            seen=", ".join(f"{where or 'top level'}: {len(found)} tensors" for where, found in networks.items())
            or f"{type(content).__name__} without {LEAST_TENSORS} tensors",
            wanted="one state dict",
            fix="save the state dict alone",
        )
    (found,) = networks.values()
    odd = [
        name
        for name, t in found.items()
        if t.is_meta or t.layout != torch.strided or not t.is_floating_point() or not torch.isfinite(t.float()).all()
    ]
    if odd:
        raise SpotDeployError(
            "drafter-content",
            f"{path.name} holds tensors that are no plain finite floating-point numbers",
            seen=", ".join(odd[:5]),
            fix="download the file again, or save the state dict in float32",
        )
    return {re.sub(r"^(?:module|_orig_mod|model)\.", "", name): tensor.float() for name, tensor in found.items()}


def _networks(content: Any, where: str) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Mappings that hold tensors, at any depth, and where they are."""
    if not isinstance(content, Mapping):
        return []
    own = {str(name): value for name, value in content.items() if isinstance(value, torch.Tensor)}
    found = [(where, own)] if own else []
    for name, value in content.items():
        found += _networks(value, f"{where}.{name}".removeprefix("."))
    return found
