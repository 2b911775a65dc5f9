"""Tracing modules to ONNX, and weights as external data inside one safetensors file."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir
import torch
from safetensors.torch import save_file
from torch.export import Dim

from spot_deploy.engines.contracts import GraphSignature, TargetShape
from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.export.order_model import OrderModel
from spot_deploy.export.target_graph import TargetGraph

OPSET = 20
WEIGHTS = "weights.safetensors"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's progress prints and deprecation notices, which tell a user nothing."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def trace_target(graph: TargetGraph, shape: TargetShape, block_width: int) -> onnx_ir.Model:
    """Trace the target graph with every symbol of the contract free."""
    signature = shape.signature()
    requests, segments, length, prefix = 2, 3, block_width, 2 * block_width
    past = [torch.zeros(requests, shape.kv_heads, prefix, shape.head_dim) for _ in range(2 * shape.layers)]
    example: dict[str, Any] = {
        "input_ids": torch.zeros(requests, segments, length, dtype=torch.int64),
        "position_base": torch.zeros(requests, segments, dtype=torch.int64),
        "parent": torch.full((requests, segments), -1),
        "own_mask": torch.zeros(length, length),
        "past_len": torch.full((requests,), prefix - 1),
        "inv_temperature": torch.ones(requests),
        "keep": torch.zeros(requests, 2, dtype=torch.int64),
        "rows": torch.arange(requests * segments * length - 1),
        "past": past,
    }
    limits = {"R": 64, "S": 512, "Q": 4096, "P": 1 << 20, "T": 16, "M": 1 << 20}
    symbols = {name: Dim(name, min=1, max=limit) for name, limit in limits.items()}
    dynamic: dict[str, Any] = {}
    for spec in signature.inputs:
        axes = {i: symbols[d] for i, d in enumerate(spec.shape) if isinstance(d, str)}
        if spec.name.startswith("past_") and spec.name != "past_len":
            dynamic.setdefault("past", []).append(axes)
        else:
            dynamic[spec.name] = axes
    return _trace(graph, example, dynamic, signature)


def trace_order_model(model: OrderModel, signature: GraphSignature) -> onnx_ir.Model:
    """Trace the order model with the number of states free."""
    states, (_, length, features) = 3, signature.inputs[0].shape
    example = {
        "features": torch.zeros(states, length, features),  # type: ignore[arg-type]
        "state_id": torch.zeros(states, length, dtype=torch.int64),  # type: ignore[arg-type]
        "depth": torch.ones(states, dtype=torch.int64),
        "masked": torch.ones(states, length, dtype=torch.bool),  # type: ignore[arg-type]
    }
    count = Dim("N", min=1, max=512)
    return _trace(model, example, {name: {0: count} for name in example}, signature)


def _trace(
    module: torch.nn.Module, example: dict[str, Any], dynamic: dict[str, Any], signature: GraphSignature
) -> onnx_ir.Model:
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            module.eval(),
            (),
            kwargs=example,
            dynamo=True,
            dynamic_shapes=dynamic,
            opset_version=OPSET,
            input_names=[t.name for t in signature.inputs],
            output_names=[t.name for t in signature.outputs],
            verbose=False,
        )
    assert program is not None
    model = program.model
    seen = [
        (
            str(v.name),
            str(v.dtype).lower().replace("float", "float32"),
            tuple(d if isinstance(d, int) else str(d) for d in v.shape or ()),
        )
        for v in [*model.graph.inputs, *model.graph.outputs]
    ]
    signature.require(seen, "traced")
    return model


def save_weights(tensors: dict[str, torch.Tensor], path: Path) -> dict[str, tuple[int, int]]:
    """Write a safetensors file; returns (offset, length) in bytes of every tensor's raw data inside it."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {
        name: (8 + size + entry["data_offsets"][0], entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in header.items()
    }


def save_graph(
    model: onnx_ir.Model,
    path: Path,
    *,
    external: dict[str, tuple[int, int]] | None = None,
    prefix: str = "",
    weights: str = WEIGHTS,
) -> None:
    """Write an ONNX file; initializers named `prefix` + a key of `external` become references into the file `weights`.

    Raises:
        SpotDeployError: a weight is no longer in the graph (the exporter would have computed with it, and kept a copy).
    """
    used: set[tuple[int, int]] = set()
    for name, value in model.graph.initializers.items():
        key = name.removeprefix(prefix)
        if external is not None and key in external and value.const_value is not None:
            offset, length = external[key]
            value.const_value = onnx_ir.ExternalTensor(
                location=weights,
                offset=offset,
                length=length,
                dtype=value.const_value.dtype,
                shape=onnx_ir.Shape(value.const_value.shape.numpy()),
                name=name,
                base_dir=path.parent,
            )
            used.add(external[key])
    lost = _not_represented(path.parent / weights, external or {}, used)
    if lost:
        raise SpotDeployError(
            "trace-weights",
            "the exporter folded weights into the graph",
            seen=", ".join(lost[:5]),
            fix="install the versions of torch and onnxscript in scripts/constraints.txt, and report yours",
        )
    onnx_ir.save(model, path)


def _not_represented(weights: Path, external: dict[str, tuple[int, int]], used: set[tuple[int, int]]) -> list[str]:
    """Names of weights that no reference of the graph stands for.

    The exporter joins small weights of equal content, such as the norms of a network that is not trained yet; those are
    represented by each other.
    """
    with weights.open("rb") as file:

        def content(place: tuple[int, int]) -> bytes:
            file.seek(place[0])
            return file.read(place[1])

        missing = {key: place for key, place in external.items() if place not in used}
        sizes = {length for _, length in missing.values()}
        present = {content(place) for place in used if place[1] in sizes}
        return sorted(key for key, place in missing.items() if content(place) not in present)
