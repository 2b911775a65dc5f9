"""The weights of a bundle: one safetensors file, whose raw bytes the graphs address as external data."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir
import torch
from safetensors.torch import save_file

from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.engines.files import safetensors_header
from spot_deploy.export.decoder import Decoder, DecoderSpec, parameter_dtype

WEIGHTS = "weights.safetensors"
SMALL = 1 << 16  # elements of a parameter that is held while tracing
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_STORED = {
    "F32": (onnx_ir.DataType.FLOAT, torch.float32),
    "F16": (onnx_ir.DataType.FLOAT16, torch.float16),
    "BF16": (onnx_ir.DataType.BFLOAT16, torch.bfloat16),
    "I8": (onnx_ir.DataType.INT8, torch.int8),
    "U8": (onnx_ir.DataType.UINT8, torch.uint8),
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a weight's raw bytes lie in the weights file, and what they are."""

    offset: int
    length: int
    dtype: onnx_ir.DataType
    torch_dtype: torch.dtype
    shape: tuple[int, ...]


def save_weights(tensors: Mapping[str, torch.Tensor], path: Path) -> dict[str, StoredTensor]:
    """Write a safetensors file; returns where every tensor's raw data lie inside it."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return stored_tensors(path)


def stream_weights(
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    tensor: Callable[[str], torch.Tensor],
    path: Path,
) -> dict[str, StoredTensor]:
    """As `save_weights`, one tensor in memory at a time.

    Args:
        shapes, dtypes: of every tensor, float32, float16 or bfloat16.
        tensor: gives a tensor of that shape and dtype.
    """
    header, at = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape) * dtypes[name].itemsize
        header[name] = {"dtype": _NAMES[dtypes[name]], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            whole = tensor(name)
            assert (tuple(whole.shape), whole.dtype) == (shape, dtypes[name]), name
            if not torch.isfinite(whole).all():
                raise SpotDeployError(
                    "checkpoint-weights",
                    "the checkpoint's weights hold values that are no finite numbers",
                    seen=f"in {name}",
                    fix="download the checkpoint again, or look at how it was trained",
                )
            whole.contiguous().flatten().view(torch.uint8).numpy().tofile(file)
    return stored_tensors(path)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Where every tensor's raw data lie inside a safetensors file, from its header."""
    begin, entries = safetensors_header(path)
    return {
        name: StoredTensor(
            begin + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
            *_STORED[entry["dtype"]],
            tuple(entry["shape"]),
        )
        for name, entry in entries.items()
    }


def hollow_decoder(spec: DecoderSpec, dtype: torch.dtype) -> Decoder:
    """A decoder to trace: its matrices are single numbers stretched to their shapes.

    Small parameters are random, since the exporter joins small ones of equal content, such as norms of a network that
    is not trained yet.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        decoder = Decoder(spec)
    for prefix, module in decoder.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            kept = parameter_dtype(f"{prefix}.{name}", dtype)
            if parameter.numel() > SMALL:
                content = torch.ones(1, dtype=kept).expand(parameter.shape)
            else:
                content = (1 + torch.rand(parameter.shape, generator=generator)).to(kept)
            setattr(module, name, torch.nn.Parameter(content, requires_grad=False))
    return decoder
