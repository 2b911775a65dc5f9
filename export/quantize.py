"""Target graphs with quantised linear layers, made from the traced float32 graphs.

`int4`: weights only, symmetric, a float32 scale for every 32 weights along the inner size (for the largest power of two
below that divides it, at least 16); the operator is com.microsoft MatMulNBits, told to compute in float32.

`int8`: weights symmetric with a scale per output, activations uint8 with one *static* scale per tensor, found at export
by calibration: QuantizeLinear and DequantizeLinear around Gemm, which backends turn into integer matrix products.
Weights keep to +-64: processors without VNNI add pairs of uint8 x int8 products in 16 bits, and 2 * 255 * 64 still
fits, so that sums are exact there too, and the same on every processor. What goes into the down projection differs most
in size from input to input; a factor moved from there into the up projection evens that out (see `even_out`).

The vocabulary head is quantised in int8 only. In int4 it would cause nearly all of the error (on the demo target: root
mean square .26 of a logit with it, .07 without), and where it is tied to the embedding it costs nothing as it is.

Activations are never quantised by a scale found while running: a row would depend on its batch mates. Embedding, norms
and attention stay in float32. All weights of a graph, these included, lie in one file of its own, so that the graph can
be used without the float32 weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir
import torch
from safetensors import safe_open
from torch import nn

from spot_deploy.engines.contracts import Array
from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.export.parity import TRACE_TOKENS, TREE_STATES, TorchTarget, random_states
from spot_deploy.export.target_graph import TargetGraph
from spot_deploy.export.trace import save_graph
from spot_deploy.export.weights import WEIGHTS, save_weights
from spot_deploy.runtime.decode import DecodeOptions, Figures, decode
from spot_deploy.runtime.manifest import Decoding
from spot_deploy.runtime.target import BlockCausalTarget, request_target

OPSET = 21  # the first whose DequantizeLinear and QuantizeLinear all backends here read alike
BLOCK, SMALLEST_BLOCK = 32, 16
INT8_LIMIT = 64
TINY = 1e-30  # weights below are zero; a scale of theirs would not be a normal number
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of an int4 block's scale: what is lost in range is won in steps
_PREFIX = "decoder."


def stays_float(precision: str, name: str) -> bool:
    """Whether a linear layer is left as it is: the head in int4, and routers, whose choices flip easily."""
    return name.endswith(".router.weight") or (precision == "int4" and name == "head.weight")


def weights_file(precision: str) -> str:
    """Name of the file that holds all weights of the graphs of a precision."""
    return f"weights-{precision}.safetensors"


@dataclass
class Seen:
    """What calibration saw at the input of one linear layer.

    Attributes:
        largest: the largest absolute value per input, float32 [in].
        square: sum of squares per input, float64 [in].
    """

    largest: Array
    square: Array

    def add(self, x: Array) -> None:
        """Add rows, float32 [rows, in]."""
        self.largest = np.maximum(self.largest, np.abs(x).max(0, initial=0.0))
        self.square += np.square(x, dtype=np.float64).sum(0)


@contextmanager
def _watched(decoder: nn.Module) -> Iterator[dict[str, Seen]]:
    """What the inputs of all linear layers are while the block runs, by the name of the layer's weight."""
    seen: dict[str, Seen] = {}
    hooks = []
    for name, module in decoder.named_modules():
        if isinstance(module, nn.Linear):
            entry = seen[f"{name}.weight"] = Seen(
                np.zeros(module.in_features, np.float32), np.zeros(module.in_features)
            )

            def hook(_: nn.Module, args: tuple[torch.Tensor, ...], entry: Seen = entry) -> None:
                entry.add(args[0].numpy())

            hooks.append(module.register_forward_pre_hook(hook))
    try:
        yield seen
    finally:
        for handle in hooks:
            handle.remove()


def calibrate(
    graph: TargetGraph, decoding: Decoding, usable: Array, prompts: Sequence[Sequence[int]]
) -> dict[str, Seen]:
    """Watch the inputs of the linear layers while the target decodes prompts at T = 1, and on random states.

    Deterministic. No text is needed besides the prompts: what the target commits is the text.

    Args:
        usable: ids that may stand in a state, int64.
        prompts: token ids.

    Returns:
        By name of the weight in the decoder, such as `layers.0.q.weight`.
    """
    session = TorchTarget(graph, decoding.shape.signature())
    options = DecodeOptions(max_new_tokens=TRACE_TOKENS, temperature=1.0, ignore_eos=True, budget=0)
    with _watched(graph.decoder) as seen:
        for index, prompt in enumerate(prompts):
            target = request_target(session, decoding, options.temperature)
            seeded = replace(options, seed=1000 + index)
            for _ in decode(target, decoding, np.array(prompt), seeded, None, Figures()):
                pass
        prefix, states = random_states(decoding, usable, TREE_STATES, seed=1000)
        target = BlockCausalTarget(session, decoding, options.temperature)
        target.prefill(prefix)
        target.verify(states, 0)
    return seen


def int4_block(inner: int) -> int:
    """How many weights share a scale.

    Raises:
        SpotDeployError: the inner size is no multiple of 16.
    """
    if inner % SMALLEST_BLOCK:
        raise SpotDeployError(
            "quantize-size",
            "int4 weights need inner sizes of linear layers that are multiples of 16",
            seen=f"a layer with {inner} inputs",
            fix="export without int4",
        )
    return BLOCK if inner % BLOCK == 0 else SMALLEST_BLOCK


def pack_int4(weight: Array, importance: Array) -> tuple[Array, Array]:
    """Quantise weights [out, in] to 4 bits in blocks along the inner size.

    Of several scales per block the one with the least squared error, weighted by importance, is taken. The weight of
    largest magnitude decides the sign of the scale, so that it takes the code -8, which has no positive twin.

    Args:
        weight: float32 [out, in].
        importance: float [in], not negative: mean square of what each weight is multiplied by.

    Returns:
        Codes + 8, uint8 [out, blocks, block / 2], the earlier of two weights in the low four bits; and scales, float32
        [out, blocks].
    """
    outer, inner = weight.shape
    block = int4_block(inner)
    blocks = weight.reshape(outer, -1, block)
    weighting = importance.astype(np.float32).reshape(1, -1, block)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    full = np.where(np.abs(extreme) < TINY, np.float32(1), extreme / np.float32(-8))
    scales, codes = full, np.zeros(blocks.shape, np.float32)
    least = np.full(full.shape, np.inf, np.float32)
    for shrink in SHRINKS:
        scale = full * np.float32(shrink)
        rounded = np.clip(np.rint(blocks / scale), -8, 7)
        error = (np.square(rounded * scale - blocks) * weighting).sum(-1, keepdims=True)
        better = error < least
        scales, codes = np.where(better, scale, scales), np.where(better, rounded, codes)
        least = np.where(better, error, least)
    unsigned = (codes + 8).astype(np.uint8)
    return unsigned[..., 0::2] | unsigned[..., 1::2] << 4, scales[..., 0]


def round_int8(weight: Array) -> tuple[Array, Array]:
    """Quantise weights float32 [out, in] to int8 [out, in] within +-64, and one float32 scale per output [out]."""
    largest = np.abs(weight).max(1)
    scales = np.where(largest < TINY, np.float32(1), largest / np.float32(INT8_LIMIT))
    return np.rint(weight / scales[:, None]).astype(np.int8), scales


def even_out(
    tensors: Mapping[str, torch.Tensor], seen: Mapping[str, Seen]
) -> tuple[dict[str, torch.Tensor], dict[str, Seen]]:
    """Divide the outputs of every up projection by factors that the down projection's weights are multiplied by.

    The network stays the same, since silu(gate) * up is linear in up. The factors are halfway between those that make
    the down projection's inputs equally large and those that make its weights so, as one scale has to serve all inputs
    (demo target: root mean square error of a logit .080 instead of .099, best token equal in 96 % instead of 94 %).
    """
    tensors, seen = dict(tensors), dict(seen)
    for down in [name for name in seen if name.endswith(".down.weight")]:
        inputs, up = seen[down], down.removesuffix("down.weight") + "up.weight"
        weights = tensors[down].abs().amax(0).numpy()
        factors = np.sqrt(np.maximum(inputs.largest, TINY**0.5) / np.maximum(weights, TINY**0.5))
        # Where an input or its weights are all but zero in calibration, the ratio means nothing.
        middle = np.exp(np.log(factors).mean())
        factors = np.clip(factors / middle, 1e-3, 1e3).astype(np.float32)
        tensors[down] = tensors[down] * torch.from_numpy(factors)
        tensors[up] = tensors[up] / torch.from_numpy(factors)[:, None]
        seen[down] = Seen(inputs.largest / factors, inputs.square / np.square(factors, dtype=np.float64))
    return tensors, seen


def write_graphs(
    precision: str,
    folder: Path,
    graphs: Mapping[str, str],
    tensors: Mapping[str, torch.Tensor],
    seen: Mapping[str, Seen],
) -> dict[str, str]:
    """Write the quantised twins of float32 target graphs, and their weights.

    Args:
        precision: `int8` or `int4`.
        folder: where the float32 graphs lie, and where the new files go.
        graphs: file names of the float32 graphs by layout.
        tensors: the decoder's parameters by name, float32; a tied head is not listed. Those that stay are taken from
            the weights file of the float32 graphs.
        seen: from `calibrate`.

    Returns:
        File names of the new graphs by layout.

    Raises:
        SpotDeployError: a size cannot be quantised, or a graph has other linear layers than the decoder.
    """
    parts: dict[str, dict[str, Array]] = {}
    if precision == "int8":
        tensors, seen = even_out(tensors, seen)
    for name, inputs in seen.items():
        if stays_float(precision, name):
            continue
        weight = tensors[name if name in tensors else "embed.weight"].numpy()
        if precision == "int4":
            codes, scales = pack_int4(weight, inputs.square)
            parts[name] = {precision: codes, "scale": scales}
        else:
            codes, scales = round_int8(weight)
            # Zeros that nothing needs, but without them ONNX Runtime multiplies in float32.
            parts[name] = {precision: codes, "scale": scales, "zero": np.zeros(len(codes), np.int8)}
    with safe_open(folder / WEIGHTS, "pt") as file:  # what stays as it is, in the dtype it came in
        stored = {name: file.get_tensor(name) for name in tensors if name not in parts}
    for name, part in parts.items():
        stored |= {f"{name}.{kind}": torch.from_numpy(array) for kind, array in part.items()}
    offsets = save_weights(stored, folder / weights_file(precision))
    if "head.weight" not in tensors:
        offsets["head.weight"] = offsets["embed.weight"]
    written = {}
    for layout, file in graphs.items():
        model = onnx_ir.load(folder / file)
        _rewrite(model, precision, parts, seen)
        written[layout] = f"{Path(file).stem}-{precision}.onnx"
        save_graph(model, folder / written[layout], external=offsets, prefix=_PREFIX, weights=weights_file(precision))
    return written


def _rewrite(
    model: onnx_ir.Model, precision: str, parts: Mapping[str, Mapping[str, Array]], seen: Mapping[str, Seen]
) -> None:
    """Put quantised operators in the place of every linear layer."""
    graph = model.graph
    done: set[str] = set()
    rounded: dict[str, onnx_ir.Value] = {}  # layers that read the same values share the rounding of them
    for node in [node for node in graph if node.op_type == "Gemm"]:
        x, weight = node.inputs[:2]
        if weight is not None and (cast := weight.producer()) is not None and cast.op_type == "Cast":
            weight = cast.inputs[0]  # stored in another dtype
        if x is None or x.name is None or weight is None or weight.name is None:
            raise _unexpected("a Gemm without inputs")
        name = weight.name.removeprefix(_PREFIX)
        if stays_float(precision, name):
            continue
        bias = node.inputs[2] if len(node.inputs) == 3 else None
        if name not in parts or node.attributes.get_int("transB", 0) != 1:
            raise _unexpected(f"a Gemm with {weight.name}")
        codes, *scaling = (_initializer(graph, f"{weight.name}.{kind}", array) for kind, array in parts[name].items())
        if precision == "int4":
            new = [_matmul_int4(x, codes, *scaling)]
            if bias is not None:
                new.append(onnx_ir.node("Add", [new[0].outputs[0], bias]))
        else:
            new = []
            if x.name not in rounded:
                new += _rounding(graph, x, float(seen[name].largest.max()))
                rounded[x.name] = new[-1].outputs[0]
            new.append(onnx_ir.node("DequantizeLinear", [codes, *scaling], {"axis": 0}))
            inputs = [rounded[x.name], new[-1].outputs[0], *([] if bias is None else [bias])]
            new.append(onnx_ir.node("Gemm", inputs, {"transB": 1}))
        before, after = node.outputs[0], new[-1].outputs[0]
        after.shape, after.type = before.shape, before.type
        graph.insert_before(node, new)
        before.replace_all_uses_with(after)
        graph.remove(node, safe=True)
        done.add(name)
    if done != set(parts):
        raise _unexpected("no Gemm for " + ", ".join(sorted(set(parts) - done)[:5]))
    for cast in [node for node in graph if node.op_type == "Cast" and not node.outputs[0].uses()]:
        graph.remove(cast, safe=True)
    for key in [key for key, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[key]
    model.opset_imports[""] = OPSET
    if precision == "int4":
        model.opset_imports["com.microsoft"] = 1


def _unexpected(seen: str) -> SpotDeployError:
    return SpotDeployError(
        "quantize-graph",
        "the traced graph has other linear layers than the decoder",
        seen=seen,
        fix="install the versions of torch and onnxscript in scripts/constraints.txt, and report yours",
    )


def _initializer(graph: onnx_ir.Graph, name: str, content: Array) -> onnx_ir.Value:
    tensor = onnx_ir.tensor(content, name=name)
    value = onnx_ir.Value(
        name=name, shape=onnx_ir.Shape(tensor.shape.numpy()), type=onnx_ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value


def _matmul_int4(x: onnx_ir.Value, codes: onnx_ir.Value, scales: onnx_ir.Value) -> onnx_ir.Node:
    assert codes.shape is not None
    outer, blocks, half = (int(n) for n in codes.shape.numpy())
    sizes = {"K": blocks * 2 * half, "N": outer, "bits": 4, "block_size": 2 * half}
    # Level 1 is float32; others may round the activations to what each row happens to hold.
    return onnx_ir.node("MatMulNBits", [x, codes, scales], sizes | {"accuracy_level": 1}, domain="com.microsoft")


def _rounding(graph: onnx_ir.Graph, x: onnx_ir.Value, largest: float) -> list[onnx_ir.Node]:
    """Activations to uint8 around 128 and back, by a scale that is part of the graph."""
    scale = _initializer(graph, f"{x.name}.scale", np.array(max(largest, 1e-6) / 127, np.float32))
    zero = _initializer(graph, f"{x.name}.zero", np.array(128, np.uint8))
    there = onnx_ir.node("QuantizeLinear", [x, scale, zero])
    return [there, onnx_ir.node("DequantizeLinear", [there.outputs[0], scale, zero])]
