"""Tracing modules to ONNX, and weights as external data inside one safetensors file."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir
import torch
from torch.export import Dim

from spot_deploy.engines.contracts import GraphSignature, TargetShape
from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.export.decoder import DecoderSpec
from spot_deploy.export.layers import layers_to_trace, repeat_last_layer
from spot_deploy.export.order_model import OrderModel
from spot_deploy.export.target_graph import TargetGraph
from spot_deploy.export.weights import WEIGHTS, StoredTensor, hollow_decoder

OPSET = 20
# `Attention` and `RMSNormalization` exist from opset 23 on; TensorRT-RTX has no float32 kernel for the former.
HALF_OPSET = 23
HALF_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
_DTYPES = {
    onnx_ir.DataType.FLOAT: "float32",
    onnx_ir.DataType.FLOAT16: "float16",
    onnx_ir.DataType.BFLOAT16: "bfloat16",
    onnx_ir.DataType.INT64: "int64",
    onnx_ir.DataType.BOOL: "bool",
}


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


def opset(precision: str) -> int:
    """The opset of a graph of this precision."""
    return HALF_OPSET if precision in HALF_DTYPES else OPSET


def float32_nodes(model: onnx_ir.Model) -> dict[str, int]:
    """How many nodes of each kind compute in float32."""
    kinds = [node.op_type for node in model.graph if any(o.dtype == onnx_ir.DataType.FLOAT for o in node.outputs)]
    return dict(sorted(Counter(kinds).items()))


def trace_target(
    spec: DecoderSpec, banned: torch.Tensor, layout: str, shape: TargetShape, block_width: int, precision: str = "f32"
) -> onnx_ir.Model:
    """Trace the target graph with every symbol of the contract free, without the weights.

    Args:
        banned, layout: as TargetGraph takes them.
        shape: of the whole network.
    """
    traced = layers_to_trace(spec)
    dtype = HALF_DTYPES.get(precision, torch.float32)
    decoder = hollow_decoder(replace(spec, layers=traced), dtype)
    graph = TargetGraph(decoder, banned, layout, shape.raw_confidence)
    signature = replace(shape, layers=traced).signature(precision)
    example, dynamic = _target_example(signature, replace(shape, layers=traced), block_width, dtype)
    outputs = [t.name for t in signature.outputs]
    if traced < spec.layers:
        seen: list[torch.Tensor] = []
        decoder.layers[-1].register_forward_hook(lambda _, inputs, out: seen.extend((inputs[1], out[0])))
        graph.register_forward_hook(lambda _, __, out: (*out, *seen[-2:]))
        outputs += ["entering", "leaving"]
    model = _trace(graph, example, dynamic, [t.name for t in signature.inputs], outputs, opset(precision))
    whole = shape.signature(precision)
    if traced < spec.layers:
        repeat_last_layer(model, whole, traced, spec.layers)
    whole.require(_described(model), "traced")
    return model


def _target_example(
    signature: GraphSignature, shape: TargetShape, block_width: int, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Example inputs, and which of their axes are free."""
    requests, segments, length, prefix = 2, 3, block_width, 2 * block_width
    sizes = (requests, shape.kv_heads, prefix, shape.head_dim)
    past = [torch.zeros(sizes, dtype=dtype) for _ in range(2 * shape.layers)]
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
    return example, dynamic


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
    names = [t.name for t in signature.inputs], [t.name for t in signature.outputs]
    traced = _trace(model, example, {name: {0: count} for name in example}, *names, OPSET)
    signature.require(_described(traced), "traced")
    return traced


def _trace(
    module: torch.nn.Module,
    example: dict[str, Any],
    dynamic: dict[str, Any],
    inputs: list[str],
    outputs: list[str],
    version: int,
) -> onnx_ir.Model:
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            module.eval(),
            (),
            kwargs=example,
            dynamo=True,
            dynamic_shapes=dynamic,
            opset_version=version,
            input_names=inputs,
            output_names=outputs,
            verbose=False,
        )
    assert program is not None
    return program.model


def _described(model: onnx_ir.Model) -> list[tuple[str, str, tuple[Any, ...]]]:
    """Name, dtype and shape of all inputs, then of all outputs."""
    return [
        (
            str(v.name),
            _DTYPES.get(v.dtype, str(v.dtype)) if v.dtype is not None else "",
            tuple(d if isinstance(d, int) else str(d) for d in v.shape or ()),
        )
        for v in [*model.graph.inputs, *model.graph.outputs]
    ]


def save_graph(
    model: onnx_ir.Model,
    path: Path,
    *,
    external: dict[str, StoredTensor] | None = None,
    prefix: str = "",
    weights: str = WEIGHTS,
) -> None:
    """Write an ONNX file; initializers named `prefix` + a key of `external` become references into the file `weights`.

    Where the stored dtype is not the graph's, a Cast follows the reference: the bytes are never written a second time.

    Raises:
        SpotDeployError: a weight is no longer in the graph (the exporter would have computed with it, and kept a copy).
    """
    used: set[StoredTensor] = set()
    for name, value in list(model.graph.initializers.items()):
        key = name.removeprefix(prefix)
        if external is None or key not in external or value.const_value is None:
            continue
        place = external[key]
        reference = onnx_ir.ExternalTensor(
            location=weights,
            offset=place.offset,
            length=place.length,
            dtype=place.dtype,
            shape=onnx_ir.Shape(value.const_value.shape.numpy()),
            name=name,
            base_dir=path.parent,
        )
        if place.dtype == value.const_value.dtype:
            value.const_value = reference
        else:
            _cast(model.graph, value, reference)
        used.add(place)
    lost = sorted(key for key, place in (external or {}).items() if place not in used)
    if lost:
        raise SpotDeployError(
            "trace-weights",
            "the exporter folded weights into the graph",
            seen=", ".join(lost[:5]),
            fix="install the versions of torch and onnxscript in scripts/constraints.txt, and report yours",
        )
    onnx_ir.save(model, path)


def _cast(graph: onnx_ir.Graph, value: onnx_ir.Value, reference: onnx_ir.ExternalTensor) -> None:
    """Put a stored tensor of another dtype in the place of an initializer, and a Cast between it and its users."""
    name, dtype = reference.name, value.const_value.dtype  # type: ignore[union-attr]
    del graph.initializers[name]
    stored = onnx_ir.Value(
        name=name, shape=reference.shape, type=onnx_ir.TensorType(reference.dtype), const_value=reference
    )
    graph.register_initializer(stored)
    cast = onnx_ir.node("Cast", [stored], {"to": dtype.value}, name=f"cast.{name}")
    cast.outputs[0].name = f"{name}.{dtype.name.lower()}"
    cast.outputs[0].shape, cast.outputs[0].type = value.shape, onnx_ir.TensorType(dtype)
    value.replace_all_uses_with(cast.outputs[0])
    graph.insert_before(graph[0], cast)
