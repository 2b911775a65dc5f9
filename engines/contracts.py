"""What the graphs take and give: names, dtypes, symbols, and the sessions that run them.

Target graph, both layouts (R requests, S segments, Q positions, P prefix bucket, T kept segments, M rows, V vocabulary,
K = min(33, V), H key/value heads, D head_dim):

| input | dtype, shape | meaning |
| --- | --- | --- |
| input_ids | int64 [R, S, Q] | tokens of every segment; Q is the block width, for prefill a multiple of it |
| position_base | int64 [R, S] | absolute position of a segment's first token |
| parent | int64 [R, S] | a segment of the same request that is attended to as well; -1 for none |
| own_mask | float32 [Q, Q] | additive mask inside a segment: zeros, or block-causal for prefill |
| past_len | int64 [R] | how many of the P prefix columns are filled |
| inv_temperature | float32 [R] | 1 / T; 1 at T = 0 |
| keep | int64 [R, T] | segments whose keys and values come back |
| rows | int64 [M] | flat (request, segment, position) indices whose vocabulary head is computed; M >= 2 |
| past_k.i, past_v.i | float32 [R, H, P, D] | keys and values of the prefix, layer i |

| output | dtype, shape | meaning |
| --- | --- | --- |
| top_logits, top_ids | float32, int64 [M, K] | the K largest logits, falling, not divided by T; banned ids are -inf |
| rest_lse | float32 [M] | log-sum-exp of logits / T over all other ids; -inf if there are none |
| rest_lse_raw | float32 [M] | the same at T = 1 (only where confidence is raw) |
| logits | float32 [M, V] | full rows, before the temperature |
| k.i, v.i | float32 [R, T, H, Q, D] | of the kept segments |

Order model (N states): features float32 [N, L, 40], state_id int64 [N, L], depth int64 [N], masked bool [N, L] to
log_q float32 [N, L], -inf where not masked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from spot_deploy.engines.errors import SpotDeployError

if TYPE_CHECKING:
    from spot_deploy.engines.prefix import Prefix

Array = npt.NDArray[Any]

HEAD_WIDTH = 33  # 32 head candidates and the value that bounds the rest
FEATURES = 40  # of the order model, per position
LAYOUTS = ("split", "packed")
# What a target graph is written in. f32 is the reference that every bundle has; int8 and int4 store and multiply the
# weights of linear layers so, and keep float32 elsewhere.
GRAPH_PRECISIONS = ("f32", "bf16", "f16", "int8", "int4")
WEIGHT_PRECISIONS = ("int8", "int4")  # graphs that store weights so, and that a backend runs in float32
_CACHE_DTYPES = {"bf16": "bfloat16", "f16": "float16"}


def target_role(layout: str, precision: str = "f32") -> str:
    """The manifest's name of a target graph: `target-split`, `target-packed-bf16`, ..."""
    return f"target-{layout}" + ("" if precision == "f32" else f"-{precision}")


ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1}
MASKED = -1e30  # additive mask for "may not look"; finite, so that a row of only masks gives no NaN
MIN_ROWS = 2  # one row alone takes another matrix kernel and differs in the last bits


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a graph input or output; a string in the shape is a free symbol."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> TensorSpec:
        return cls(document["name"], document["dtype"], tuple(document["shape"]))


@dataclass(frozen=True)
class GraphSignature:
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"inputs": [t.as_dict() for t in self.inputs], "outputs": [t.as_dict() for t in self.outputs]}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> GraphSignature:
        inputs, outputs = (tuple(TensorSpec.from_dict(t) for t in document[key]) for key in ("inputs", "outputs"))
        return cls(inputs, outputs)

    @property
    def past_names(self) -> list[str]:
        """past_k.0, past_v.0, past_k.1, ..."""
        return [t.name for t in self.inputs if t.name.startswith(("past_k.", "past_v."))]

    @property
    def head_names(self) -> list[str]:
        """Outputs that every pass brings: all but the full logits and what is kept."""
        return [t.name for t in self.outputs if t.name not in (*self.kept_names, "logits")]

    @property
    def kept_names(self) -> list[str]:
        """k.0, v.0, k.1, ..."""
        return [t.name for t in self.outputs if t.name.startswith(("k.", "v."))]

    def require(self, seen: Sequence[tuple[str, str, tuple[Any, ...]]], which: str) -> None:
        """Compare with what a session reports: (name, dtype, shape) of inputs, then of outputs.

        Raises:
            SpotDeployError: a name, dtype or fixed dimension differs.
        """
        wanted = [*self.inputs, *self.outputs]
        for spec, (name, dtype, shape) in zip(wanted, seen, strict=False):
            fixed = all(
                not isinstance(a, int) or not isinstance(b, int) or a == b
                for a, b in zip(spec.shape, shape, strict=False)
            )
            if (spec.name, spec.dtype, len(spec.shape)) != (name, dtype, len(shape)) or not fixed:
                raise _signature_error(which, f"{name} {dtype} {list(shape)}", str(spec.as_dict()))
        if len(wanted) != len(seen):
            raise _signature_error(which, f"{len(seen)} inputs and outputs", str(len(wanted)))


def _signature_error(which: str, seen: str, wanted: str) -> SpotDeployError:
    return SpotDeployError(
        "graph-signature",
        f"the {which} graph is not the one the manifest describes",
        seen=seen,
        wanted=wanted,
        fix="export the bundle again",
    )


@dataclass(frozen=True)
class TargetShape:
    """The sizes of a target that its graph signature depends on."""

    layers: int
    kv_heads: int
    head_dim: int
    vocab: int
    raw_confidence: bool

    @property
    def head_width(self) -> int:
        return min(HEAD_WIDTH, self.vocab)

    def signature(self, precision: str = "f32") -> GraphSignature:
        """The contract above for these sizes; keys and values are float16 or bfloat16 in graphs of that precision."""
        i64, f32, kv = "int64", "float32", _CACHE_DTYPES.get(precision, "float32")
        past: tuple[int | str, ...] = ("R", self.kv_heads, "P", self.head_dim)
        kept: tuple[int | str, ...] = ("R", "T", self.kv_heads, "Q", self.head_dim)
        per_layer = [f"{kind}.{i}" for i in range(self.layers) for kind in "kv"]
        inputs = [
            TensorSpec("input_ids", i64, ("R", "S", "Q")),
            TensorSpec("position_base", i64, ("R", "S")),
            TensorSpec("parent", i64, ("R", "S")),
            TensorSpec("own_mask", f32, ("Q", "Q")),
            TensorSpec("past_len", i64, ("R",)),
            TensorSpec("inv_temperature", f32, ("R",)),
            TensorSpec("keep", i64, ("R", "T")),
            TensorSpec("rows", i64, ("M",)),
            *(TensorSpec(f"past_{name}", kv, past) for name in per_layer),
        ]
        outputs = [
            TensorSpec("top_logits", f32, ("M", self.head_width)),
            TensorSpec("top_ids", i64, ("M", self.head_width)),
            TensorSpec("rest_lse", f32, ("M",)),
            *([TensorSpec("rest_lse_raw", f32, ("M",))] if self.raw_confidence else []),
            TensorSpec("logits", f32, ("M", self.vocab)),
            *(TensorSpec(name, kv, kept) for name in per_layer),
        ]
        return GraphSignature(tuple(inputs), tuple(outputs))


def order_signature(block_width: int) -> GraphSignature:
    """The order model's contract."""
    length = block_width
    return GraphSignature(
        (
            TensorSpec("features", "float32", ("N", length, FEATURES)),
            TensorSpec("state_id", "int64", ("N", length)),
            TensorSpec("depth", "int64", ("N",)),
            TensorSpec("masked", "bool", ("N", length)),
        ),
        (TensorSpec("log_q", "float32", ("N", length)),),
    )


@dataclass(frozen=True)
class TargetInputs:
    """One pass of the target; see the table above. `past`: k.0, v.0, k.1, ..., or a session's own `Prefix.past`."""

    input_ids: Array
    position_base: Array
    parent: Array
    own_mask: Array
    past_len: Array
    inv_temperature: Array
    keep: Array
    rows: Array
    past: Any

    def small(self) -> dict[str, Array]:
        """All but the prefix, by input name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "past"}

    def feeds(self, past_names: Sequence[str]) -> dict[str, Array]:
        """By input name, where the prefix lies on the host; `past_names` are those of its tensors, in order."""
        return self.small() | dict(zip(past_names, self.past, strict=True))


@dataclass(frozen=True)
class TargetOutputs:
    """What leaves the pass. `row(m)` fetches one full row of logits [V].

    `kept` is empty unless asked for, else what the session's `Prefix.write` takes: on the host, arrays.
    """

    top_logits: Array
    top_ids: Array
    rest_lse: Array
    rest_lse_raw: Array | None
    row: Callable[[int], Array]
    kept: Sequence[Any]

    @classmethod
    def of(cls, head: Mapping[str, Array], row: Callable[[int], Array], kept: Sequence[Any]) -> TargetOutputs:
        """From the head's outputs by name (see GraphSignature.head_names); others are let be."""
        return cls(head["top_logits"], head["top_ids"], head["rest_lse"], head.get("rest_lse_raw"), row, kept)


@dataclass(frozen=True)
class Compiled:
    """What a backend must know of a compiled engine file before it opens it.

    Attributes:
        sha256: of the file; bytes of another digest are not given to the backend.
        host_code: it holds code that runs on the host, as engines that are portable between versions do.
        weights: the ONNX file whose weights it was stripped of; None where it has its own.
        buffers: bytes that it needs on the GPU besides weights, for one prefix and one pass; 0: not known.
        kernels: a file of kernels that were compiled for it on this kind of GPU, and its sha256.
    """

    sha256: str
    host_code: bool = False
    weights: Path | None = None
    buffers: int = 0
    kernels: tuple[Path, str] | None = None


class TargetSession(Protocol):
    """A target ready to run. Safe to call from several threads.

    Attributes:
        fixed_shapes: passes shall have the shape of a full budget: those that have been recorded can be replayed.
    """

    fixed_shapes: bool

    def run(self, inputs: TargetInputs, *, keep: bool) -> TargetOutputs:
        """One pass. `keep`: return keys and values."""
        ...

    def prefix(self, shape: TargetShape, size: int) -> Prefix:
        """Empty buffers for a request's prefix of up to `size` positions."""
        ...


class OrderSession(Protocol):
    """An order model ready to run. Safe to call from several threads."""

    def run(self, features: Array, state_id: Array, depth: Array, masked: Array) -> Array:
        """Log-probabilities of the next position, float32 [N, L]."""
        ...
