"""What an ONNX graph consists of, part by part: for people who want to see what was traced."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir

SCOPES = "pkg.torch.onnx.name_scopes"  # where the exporter notes the modules that a node came from


@dataclass
class Part:
    """One part of a graph: nodes by operator, and bytes of weights by dtype."""

    name: str
    operators: Counter[str] = field(default_factory=Counter)
    weights: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        return {
            "part": self.name,
            "nodes": self.operators.total(),
            "operators": dict(self.operators.most_common()),
            "weight_bytes": dict(self.weights),
        }


def graph_parts(path: Path) -> list[Part]:
    """The parts of an ONNX file in their order: every layer of its own, and what lies before, between and after."""
    model = onnx_ir.load(path)
    parts: dict[str, Part] = {}
    for node in model.graph:
        name = _part(node.metadata_props.get(SCOPES, ""))
        part = parts.setdefault(name, Part(name))
        part.operators[node.op_type] += 1
        for value in node.inputs:
            if value is not None and value.is_initializer() and value.const_value is not None:
                tensor = value.const_value
                part.weights[str(tensor.dtype).lower()] += tensor.nbytes
    return list(parts.values())


def _part(scopes: str) -> str:
    layer = re.search(r"layers\.(\d+)\b", scopes)
    return f"layer {layer[1]}" if layer else "outside the layers"


def grouped(parts: list[Part]) -> Iterator[tuple[str, Part]]:
    """Equal parts that follow each other as one: (`layer 0..5, each`, the part)."""
    for _, group in itertools.groupby(parts, key=lambda part: (part.operators, part.weights)):
        first, *others = group
        yield f"{first.name}..{others[-1].name.split()[-1]}, each" if others else first.name, first
