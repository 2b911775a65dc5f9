"""`manifest.json`: what a bundle is, parsed into frozen dataclasses and checked when read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from spot_deploy.engines.contracts import (
    GRAPH_PRECISIONS,
    LAYOUTS,
    GraphSignature,
    TargetShape,
    order_signature,
    target_role,
)
from spot_deploy.engines.errors import SpotDeployError, usage_error
from spot_deploy.engines.files import read_json

FORMAT = "spot-deploy-bundle"
SCHEMA_VERSION = 3
MANIFEST = "manifest.json"
CONFIDENCES = ("tempered", "raw")
ATTENTIONS = ("block-causal", "full")
HEDGE_WEIGHTS = ("normalised", "raw", "none")
MAX_BUDGET = 256
LIMIT = 2**24  # of any size; what is above is damage


@dataclass(frozen=True)
class Decoding:
    """How the target is decoded.

    Attributes:
        block_width: positions per block, L.
        mask_id, stop_ids, bos_id: special token ids; `bos_id` is None where an empty prompt is not legal.
        confidence: `tempered` (SDAR) or `raw` (LLaDA).
        attention: `block-causal` (a position sees its own block and those before) or `full`.
        logit_shift: 1 where row p - 1 predicts position p (Dream, Fast-dLLM v2).
        given_start: the first token of a block comes from the pass that stores the block before (Fast-dLLM v2).
        max_positions: capacity in positions.
        buckets: prefix sizes that engines run, rising, multiples of the block width.
        prefill_positions: positions per prefill pass at most.
        exact_cache: whether cached keys and values are those of the true model; they are where attention is
            block-causal.
        shape: sizes that fix the target graph's signature.
    """

    block_width: int
    mask_id: int
    stop_ids: tuple[int, ...]
    bos_id: int | None
    confidence: str
    attention: str
    logit_shift: int
    given_start: bool
    max_positions: int
    buckets: tuple[int, ...]
    prefill_positions: int
    shape: TargetShape

    def __post_init__(self) -> None:
        vocab, width = self.shape.vocab, self.block_width
        if not 1 <= width <= 64:
            raise ValueError(f"block_width {width} is not within 1..64")
        ids = [self.mask_id, *self.stop_ids, *([] if self.bos_id is None else [self.bos_id])]
        checks = {
            f"a token id of {ids} is outside the vocabulary of {vocab}": all(0 <= i < vocab for i in ids),
            f"the mask id {self.mask_id} is a stop id": self.mask_id not in self.stop_ids,
            f"confidence {self.confidence!r} is none of {CONFIDENCES}": self.confidence in CONFIDENCES,
            f"attention {self.attention!r} is none of {ATTENTIONS}": self.attention in ATTENTIONS,
            f"logit_shift {self.logit_shift} is not 0 or 1": self.logit_shift in (0, 1),
            "block-causal attention with shifted logits needs a given start, and only there is one": self.given_start
            == (self.attention == "block-causal" and self.logit_shift == 1),
            "a given start needs blocks of two positions": width > 1 or not self.given_start,
            f"max_positions {self.max_positions} is no positive multiple of {width}": self.max_positions >= width
            and self.max_positions % width == 0,
            f"buckets {self.buckets} are not rising multiples of {width} that cover max_positions": bool(self.buckets)
            and all(b % width == 0 for b in self.buckets)
            and list(self.buckets) == sorted(set(self.buckets))
            and self.buckets[0] > 0
            and self.buckets[-1] >= self.max_positions - width,
            f"prefill_positions {self.prefill_positions} is below {width}": self.prefill_positions >= width,
            f"prefill_positions {self.prefill_positions} or max_positions {self.max_positions} is above {LIMIT}": max(
                self.prefill_positions, self.max_positions
            )
            <= LIMIT,
            "confidence and the target's outputs disagree": (self.confidence == "raw") == self.shape.raw_confidence,
        }
        bad = [text for text, right in checks.items() if not right]
        if bad:
            raise ValueError("; ".join(bad))

    @property
    def exact_cache(self) -> bool:
        """See above."""
        return self.attention == "block-causal"

    @property
    def window(self) -> int:
        """Positions of a verified segment: a block, and the one before it where that predicts its first."""
        return self.block_width + (self.logit_shift if self.attention == "full" else 0)

    @property
    def reserved(self) -> tuple[int, ...]:
        """Ids that a user's text may never become."""
        return (self.mask_id, *self.stop_ids, *([] if self.bos_id is None else [self.bos_id]))

    def bucket(self, filled: int) -> int:
        """The smallest bucket that holds `filled` prefix positions."""
        return next(b for b in self.buckets if b >= filled)

    def origin(self, prompt: int) -> int:
        """Position where block 0 begins: 0, or the end of the prompt where attention is full (as LLaDA's sampler)."""
        return 0 if self.attention == "block-causal" else prompt

    def blocks(self, prompt: int, new_tokens: int) -> range:
        """The blocks to generate; the first may hold the end of the prompt, the last is always filled."""
        begin, width = prompt - self.origin(prompt), self.block_width
        return range(begin // width, math.ceil((begin + new_tokens) / width))

    def positions(self, prompt: int, new_tokens: int) -> int:
        """Positions of the whole sequence: prompt and generation, up to the end of the last block."""
        return self.origin(prompt) + self.blocks(prompt, new_tokens).stop * self.block_width


def default_buckets(block_width: int, max_positions: int) -> tuple[int, ...]:
    """Doubling sizes from two blocks up to the capacity."""
    buckets, size = [], 2 * block_width
    while size < max_positions:
        buckets.append(size)
        size *= 2
    return (*buckets, max_positions)


@dataclass(frozen=True)
class Speculation:
    """Defaults of the drafter (see DecodeOptions); `order_model` says whether the bundle holds one.

    `budgets` are the budgets that engines are made and probed for.
    """

    order_model: bool
    budgets: tuple[int, ...]
    budget: int
    gamma: float
    tau: float
    hedge_gate: float
    hedge_weights: str

    def __post_init__(self) -> None:
        checks = {
            f"budgets {self.budgets} do not rise from 0 to at most {MAX_BUDGET}": self.budgets[:1] == (0,)
            and list(self.budgets) == sorted(set(self.budgets))
            and self.budgets[-1] <= MAX_BUDGET,
            f"the default budget {self.budget} is none of {self.budgets}": self.budget in self.budgets,
            f"gamma {self.gamma} is not within 0..1e9": 0 <= self.gamma <= 1e9,
            f"tau {self.tau} is not within 0.01..100": 0.01 <= self.tau <= 100,
            f"hedge_gate {self.hedge_gate} is not within 0..1": 0 <= self.hedge_gate <= 1,
            f"hedge_weights {self.hedge_weights!r} is none of {HEDGE_WEIGHTS}": self.hedge_weights in HEDGE_WEIGHTS,
        }
        bad = [text for text, right in checks.items() if not right]
        if bad:
            raise ValueError("; ".join(bad))


@dataclass(frozen=True)
class FileEntry:
    """A file of the bundle: relative path, size in bytes, sha256."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The parsed manifest.

    `named_tokens` are those that a chat template may use (bos_token, ...). `parity` and `source` are kept as they are,
    for people to read.
    """

    bundle_id: str
    created_by: str
    created_at: str
    source: Mapping[str, Any]
    precision: str
    decoding: Decoding
    named_tokens: Mapping[str, str]
    speculation: Speculation
    graphs: Mapping[str, Mapping[str, Any]]
    parity: Mapping[str, Any]
    files: tuple[FileEntry, ...]

    def graph(self, role: str) -> tuple[str, GraphSignature]:
        """File name and signature of a graph: `order`, or a name as `contracts.target_role` gives it."""
        entry = self.graphs[role]
        return str(entry["file"]), GraphSignature.from_dict(dict(entry["signature"]))


def to_document(manifest: Manifest) -> dict[str, Any]:
    """The manifest as JSON values."""
    decoding = {f.name: getattr(manifest.decoding, f.name) for f in fields(Decoding)}
    decoding["exact_cache"] = manifest.decoding.exact_cache
    decoding["shape"] = {f.name: getattr(manifest.decoding.shape, f.name) for f in fields(TargetShape)}
    decoding["tie_rule"] = "equal confidence: lowest position; equal logits: lowest id"
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "bundle_id": manifest.bundle_id,
        "created_by": manifest.created_by,
        "created_at": manifest.created_at,
        "source": dict(manifest.source),
        "precision": manifest.precision,
        "decoding": decoding,
        "named_tokens": dict(manifest.named_tokens),
        "speculation": {f.name: getattr(manifest.speculation, f.name) for f in fields(Speculation)},
        "graphs": {role: dict(entry) for role, entry in manifest.graphs.items()},
        "parity": dict(manifest.parity),
        "files": [{"path": f.path, "bytes": f.bytes, "sha256": f.sha256} for f in manifest.files],
    }


def is_bundle(folder: Path) -> bool:
    """Whether a folder was written by `export`, of whatever version."""
    try:
        document = read_json(folder / MANIFEST, code="manifest", fix="")
    except SpotDeployError:
        return False
    return isinstance(document, dict) and document.get("format") == FORMAT


def read_manifest(folder: Path) -> Manifest:
    """Read and check `manifest.json`.

    Raises:
        SpotDeployError: no bundle there, another format, a newer schema, or fields that contradict each other.
    """
    path = folder / MANIFEST
    try:
        found = path.is_file()
    except OSError as error:
        raise usage_error(
            "bundle-path", "the bundle's path cannot be", seen=str(error)[:200], fix="check it"
        ) from error
    if not found:
        raise _not_a_bundle(folder)
    document = read_json(path, code="manifest", fix="export the bundle again")
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        seen = repr(document.get("format")) if isinstance(document, dict) else type(document).__name__
        raise SpotDeployError(
            "manifest-format", f"{path} is no bundle manifest", seen=seen, wanted=FORMAT, fix="give a bundle folder"
        )
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        newer = isinstance(version, int) and version > SCHEMA_VERSION
        raise SpotDeployError(
            "manifest-schema",
            "the bundle's schema is not one that this version reads",
            seen=f"schema_version {version!r}",
            wanted=str(SCHEMA_VERSION),
            fix="upgrade spot-deploy" if newer else "export the bundle again",
        )
    try:
        manifest = _parse(document)
        _cross_check(manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        text = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise SpotDeployError(
            "manifest-invalid", f"{path} contradicts itself or lacks a field", seen=text, fix="export the bundle again"
        ) from error
    return manifest


def _not_a_bundle(folder: Path) -> SpotDeployError:
    if not folder.exists():
        return SpotDeployError(
            "bundle-missing", f"there is no {folder}", fix="spot-deploy export CHECKPOINT -o BUNDLE makes a bundle"
        )
    seen = "a file" if folder.is_file() else "a folder without manifest.json"
    if (folder / "config.json").is_file():
        seen = "a checkpoint (config.json)"
    return SpotDeployError(
        "not-a-bundle",
        f"{folder} is not a bundle",
        seen=seen,
        wanted="a folder made by spot-deploy export",
        fix=f"spot-deploy export {folder} -o BUNDLE" if "checkpoint" in seen else "give a bundle folder",
    )


def _take(document: Mapping[str, Any], name: str, kind: type, check: Callable[[Any], bool] = lambda _: True) -> Any:
    value = document[name]
    right = isinstance(value, kind) or (kind is float and type(value) is int)
    if not right or (kind is not bool and isinstance(value, bool)) or not check(value):
        raise ValueError(f"{name} is {value!r}")
    return float(value) if kind is float else value


def _integers(document: Mapping[str, Any], name: str) -> tuple[int, ...]:
    values = _take(document, name, list)
    if not all(type(v) is int for v in values):
        raise ValueError(f"{name} is {values!r}")
    return tuple(values)


def _parse(document: dict[str, Any]) -> Manifest:
    raw, spec = _take(document, "decoding", dict), _take(document, "speculation", dict)
    sizes = _take(raw, "shape", dict)
    shape = TargetShape(
        layers=_take(sizes, "layers", int, lambda v: 0 < v <= 1024),
        **{name: _take(sizes, name, int, lambda v: 0 < v <= LIMIT) for name in ("kv_heads", "head_dim", "vocab")},
        raw_confidence=_take(sizes, "raw_confidence", bool),
    )
    decoding = Decoding(
        **{
            name: _take(raw, name, int)
            for name in ("block_width", "mask_id", "logit_shift", "max_positions", "prefill_positions")
        },
        stop_ids=_integers(raw, "stop_ids"),
        bos_id=None if raw["bos_id"] is None else _take(raw, "bos_id", int),
        confidence=_take(raw, "confidence", str),
        attention=_take(raw, "attention", str),
        given_start=_take(raw, "given_start", bool),
        buckets=_integers(raw, "buckets"),
        shape=shape,
    )
    if _take(raw, "exact_cache", bool) != decoding.exact_cache:
        raise ValueError(f"exact_cache is {raw['exact_cache']}, attention {decoding.attention!r}")
    speculation = Speculation(
        order_model=_take(spec, "order_model", bool),
        budgets=_integers(spec, "budgets"),
        budget=_take(spec, "budget", int, lambda v: v >= 0),
        hedge_weights=_take(spec, "hedge_weights", str),
        **{name: _take(spec, name, float) for name in ("gamma", "tau", "hedge_gate")},
    )
    return Manifest(
        decoding=decoding,
        named_tokens=_take(document, "named_tokens", dict, lambda d: all(isinstance(v, str) for v in d.values())),
        speculation=speculation,
        graphs=_take(document, "graphs", dict),
        source=_take(document, "source", dict),
        parity=_take(document, "parity", dict),
        files=tuple(
            FileEntry(_take(f, "path", str), _take(f, "bytes", int), _take(f, "sha256", str))
            for f in _take(document, "files", list)
        ),
        **{name: _take(document, name, str) for name in ("bundle_id", "created_by", "created_at", "precision")},
    )


def _cross_check(manifest: Manifest) -> None:
    """Paths stay inside the folder, every graph is a listed file, signatures are those of the sizes."""
    for name in ("family", "checkpoint"):
        _take(manifest.source, name, str)
    _take(manifest.parity, "mode", str)
    _take(manifest.parity, "measured", dict)
    paths = [f.path for f in manifest.files]
    for path in paths:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*", path):
            raise ValueError(f"the path {path!r} may not be in a bundle")
    if len({p.lower() for p in paths}) != len(paths):
        raise ValueError("two files differ in case only, or are listed twice")
    shape = manifest.decoding.shape
    wanted = {target_role(layout): shape.signature() for layout in LAYOUTS}
    if manifest.speculation.order_model:
        wanted["order"] = order_signature(manifest.decoding.block_width)
    further = {target_role(layout, p): shape.signature(p) for layout in LAYOUTS for p in GRAPH_PRECISIONS}
    if not set(wanted) <= set(manifest.graphs) <= set(wanted) | set(further):
        raise ValueError(f"graphs are {sorted(manifest.graphs)}, expected {sorted(wanted)}")
    for role, signature in (further | wanted).items():
        if role not in manifest.graphs:
            continue
        file, found = manifest.graph(role)
        _take(manifest.graphs[role], "opset", int)
        if file not in paths:
            raise ValueError(f"the graph {role} names {file}, which is not among the files")
        if found != signature:
            raise ValueError(f"the signature of {role} does not fit the target's sizes")
