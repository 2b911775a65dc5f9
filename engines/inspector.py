"""What a finished TensorRT engine consists of, from the JSON of TensorRT's engine inspector.

Forms that are understood: TensorRT 10 and TensorRT for RTX ("Format/Datatype": "Half", or older and wordier "Row major
linear FP16 format"), TensorRT 11 ("Datatype" and "Format" apart). Where shapes are dynamic, some versions say "N/A due
to dynamic shapes" in the place of a datatype; then the types of weights and the names of kernels still tell.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spot_deploy.engines.contracts import GRAPH_PRECISIONS

# In TensorRT's words, longest first: "bfloat16" holds "float".
_DTYPES = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float8": "float8",
    "fp8": "float8",
    "float4": "float4",
    "fp4": "float4",
    "float": "float32",
    "fp32": "float32",
    "half": "float16",
    "fp16": "float16",
    "int64": "int64",
    "int32": "int32",
    "int8": "int8",
    "int4": "int4",
    "bool": "bool",
}
_COMPUTED_IN = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_SIXTEEN_BITS = {"float16", "bfloat16"}


@dataclass(frozen=True)
class Layer:
    """A layer of an engine. `dtypes`: of its inputs, outputs and weights, as far as the inspector tells, sorted."""

    name: str
    kind: str
    tactic: str
    dtypes: tuple[str, ...]


def parse_layers(text: str) -> list[Layer]:
    """The layers in what `get_engine_information(LayerInformationFormat.JSON)` gives.

    Raises:
        ValueError: it is no such JSON.
    """
    document = json.loads(text, strict=False)
    if not isinstance(document, dict) or not isinstance(document.get("Layers"), list):
        raise ValueError('an object with "Layers" was expected')
    return [_layer(entry) for entry in document["Layers"]]


def _layer(entry: object) -> Layer:
    if not isinstance(entry, Mapping):  # an engine that was built without detailed verbosity: names alone
        return Layer(str(entry), "", "", ())
    said = [str(tensor.get("Format/Datatype") or tensor.get("Datatype") or "") for tensor in _tensors(entry)]
    said += [str(value.get("Type", "")) for value in entry.values() if isinstance(value, Mapping)]
    dtypes = {dtype for dtype in map(_dtype, said) if dtype}
    tactic = str(entry.get("TacticName") or entry.get("TacticValue") or "")
    return Layer(str(entry.get("Name", "")), str(entry.get("LayerType", "")), tactic, tuple(sorted(dtypes)))


def _tensors(entry: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    for key in ("Inputs", "Outputs"):
        yield from (t for t in entry.get(key) or () if isinstance(t, Mapping))


def _dtype(text: str) -> str | None:
    lower = text.lower()
    return next((dtype for word, dtype in _DTYPES.items() if word in lower), None)


def summary(layers: Sequence[Layer]) -> dict[str, Any]:
    """Counts of layers by type and by the dtypes that they touch; `untold`: layers that the inspector says none of."""
    return {
        "layers": dict(sorted(Counter(layer.kind or "?" for layer in layers).items())),
        "dtypes": dict(sorted(Counter(d for layer in layers for d in layer.dtypes).items())),
        "untold": sum(not layer.dtypes for layer in layers),
    }


def wrong_precision(layers: Sequence[Layer], precision: str) -> str | None:
    """What shows that an engine does not compute in a precision, in a sentence; None where nothing does.

    An engine of a 16-bit graph must have layers in it, and one in float32 none in 16 bits and no TF32 kernel (which
    multiplies with 10 bits). An inspector that tells no dtype at all shows nothing.
    """
    assert precision in GRAPH_PRECISIONS
    counts = Counter(d for layer in layers for d in layer.dtypes)
    wanted = _COMPUTED_IN.get(precision, "float32")
    floats = {d for d in counts if "float" in d}
    if floats and wanted not in floats:
        return f"no layer is in {wanted}: {', '.join(f'{n} in {d}' for d, n in sorted(counts.items()))}"
    if wanted == "float32":
        lower = sorted(_SIXTEEN_BITS & floats)
        if lower:
            return "layers in " + ", ".join(f"{d} ({counts[d]})" for d in lower)
        kernels = [layer.tactic for layer in layers if re.search(r"(?<![a-z])tf32", layer.tactic, re.IGNORECASE)]
        if kernels:
            return f"{len(kernels)} layers use TF32 kernels, such as {kernels[0]}"
    return None
