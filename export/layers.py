"""Deep graphs from shallow traces: the last traced layer is repeated.

Tracing costs seconds a layer and layers of a kind differ in nothing but names, so a network is traced with as many
layers as it takes to see the last kind behind another layer. What reads the entering hidden states, or the layer's own
weights or prefix, and leads to what leaves it is the layer; all else that it reads (positions, masks, sizes) is shared.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir

from spot_deploy.engines.contracts import GraphSignature
from spot_deploy.export.decoder import DecoderSpec

PREFIX = "decoder.layers"  # of the parameters' names in the graph


def layers_to_trace(spec: DecoderSpec) -> int:
    """How many of the first layers stand for all: the last of them is of one kind with all that follow."""
    dense = [spec.moe_at(index) is None for index in range(spec.layers)]
    same = next(n for n in range(spec.layers) if len(set(dense[n:])) == 1)
    return min(spec.layers, max(same + 1, 2))


def repeat_last_layer(model: onnx_ir.Model, signature: GraphSignature, traced: int, layers: int) -> None:
    """Grow a graph from `traced` layers to `layers`, in place.

    Args:
        model: its last two outputs are the hidden states before and after the last layer; they are taken away.
        signature: that of the grown graph.
    """
    graph = model.graph
    leaving = graph.outputs.pop()
    entering = graph.outputs.pop()
    last = traced - 1
    past, kept = signature.past_names, signature.kept_names
    prefix = [value for value in graph.inputs if value.name in past[2 * last :]]
    own = [value for name, value in graph.initializers.items() if name.startswith(f"{PREFIX}.{last}.")]
    stored = [value for value in graph.outputs if value.name in kept[2 * last :]]
    nodes = _between(graph, [entering, *prefix, *own], [leaving, *stored])
    after = [use for use in leaving.uses() if use.node not in set(nodes)]
    left = leaving
    for index in range(traced, layers):
        twins = {entering: left}
        for value, name in zip(prefix, past[2 * index :], strict=False):
            twins[value] = _twin(value, name)
            graph.inputs.append(twins[value])
        for value in own:
            name = f"{PREFIX}.{index}.{str(value.name).removeprefix(f'{PREFIX}.{last}.')}"
            twins[value] = _twin(value, name)
            graph.register_initializer(twins[value])
        for node in nodes:
            outputs = [_twin(value, f"layers.{index}.{value.name}") for value in node.outputs]
            twins |= dict(zip(node.outputs, outputs, strict=True))
            graph.append(
                onnx_ir.Node(
                    node.domain,
                    node.op_type,
                    [value if value is None else twins.get(value, value) for value in node.inputs],
                    node.attributes.values(),
                    name=f"layers.{index}.{node.name}",
                    outputs=outputs,
                )
            )
        left = twins[leaving]
        for value, name in zip(stored, kept[2 * index :], strict=False):
            twins[value].name = name
            graph.outputs.append(twins[value])
    for use in after:
        use.node.replace_input_with(use.idx, left)
    graph.sort()


def _between(
    graph: onnx_ir.Graph, sources: Sequence[onnx_ir.Value], results: Sequence[onnx_ir.Value]
) -> list[onnx_ir.Node]:
    """All nodes on a way from a source to a result, in order. Sizes are equal in all layers, so they make no way."""
    reached, below = set(sources), []
    for node in graph:
        if node.op_type != "Shape" and not reached.isdisjoint(value for value in node.inputs if value is not None):
            reached.update(node.outputs)
            below.append(node)
    needed, nodes = set(results), []
    for node in reversed(below):
        if not needed.isdisjoint(node.outputs):
            needed.update(value for value in node.inputs if value is not None)
            nodes.append(node)
    return nodes[::-1]


def _twin(value: onnx_ir.Value, name: str) -> onnx_ir.Value:
    return onnx_ir.Value(name=name, shape=value.shape, type=value.type, const_value=value.const_value)
