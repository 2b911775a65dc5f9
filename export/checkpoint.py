"""Reading a Hugging Face folder: config, ids, tokenizer, weights. safetensors only; no pickle, no remote code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spot_deploy.engines.contracts import TargetShape
from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.engines.files import read_json
from spot_deploy.export.decoder import Decoder, DecoderSpec
from spot_deploy.export.families import Family, find_family
from spot_deploy.runtime.manifest import Decoding, default_buckets
from spot_deploy.runtime.text import Text

MAX_POSITIONS, PREFILL_POSITIONS = 32768, 512
KEPT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FIX = "download the checkpoint again"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that can be exported; weights are not read yet.

    Attributes:
        banned: ids that may never be sampled: the mask, and what the tokenizer cannot decode; bool [vocab].
    """

    folder: Path
    config: Mapping[str, Any]
    family: Family
    spec: DecoderSpec
    decoding: Decoding
    banned: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """All weights in float32 under our names; raises as `stored`."""
        return {name: tensor.float() for name, tensor in self.stored().items()}

    def stored(self) -> dict[str, torch.Tensor]:
        """All weights under our names, in the checkpoint's own dtypes: float32, float16 or bfloat16, others as float32.

        Raises:
            SpotDeployError: a file or tensor is missing, or a shape does not fit.
        """
        files = self._weight_files()
        from safetensors import SafetensorError, safe_open

        wanted = dict(Decoder.shapes(self.spec))
        found: dict[str, torch.Tensor] = {}
        ours = {theirs: own for own, theirs in self.family.tensor_names(self.spec).items()}
        unknown = []
        for file in files:
            try:
                with safe_open(file, "pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 - not a mapping
                        if name in ours:
                            tensor = tensors.get_tensor(name)
                            found[ours[name]] = tensor if tensor.dtype in KEPT_DTYPES else tensor.float()
                        elif not (self.spec.tied_head and name == "lm_head.weight"):
                            unknown.append(name)
            except (OSError, SafetensorError) as error:
                raise SpotDeployError(
                    "checkpoint-weights", f"cannot read {file}", seen=str(error), fix="download the checkpoint again"
                ) from error
        wrong = [
            f"{n}: {list(found[n].shape)} in place of {list(s)}"
            for n, s in wanted.items()
            if n in found and tuple(found[n].shape) != s
        ]
        missing = sorted(set(wanted) - set(found))
        if missing or wrong or unknown:
            raise SpotDeployError(
                "checkpoint-tensors",
                "the checkpoint's tensors are not those of its config",
                seen="; ".join(
                    ([f"missing: {', '.join(missing[:5])} ({len(missing)})"] if missing else [])
                    + ([f"unknown: {', '.join(unknown[:5])} ({len(unknown)})"] if unknown else [])
                    + wrong[:5]
                ),
                fix="check that config.json belongs to these weights",
            )
        return found

    def _weight_files(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            document = read_json(index, code="checkpoint-index", fix="download the checkpoint again")
            try:
                names = sorted({str(name) for name in document["weight_map"].values()})
            except (KeyError, TypeError, AttributeError) as error:
                raise SpotDeployError(
                    "checkpoint-index", f"{index.name} has no weight_map", seen=repr(error), fix="download it again"
                ) from error
        else:
            names = ["model.safetensors"]
        missing = [name for name in names if not (self.folder / name).is_file()]
        if missing:
            raise SpotDeployError(
                "checkpoint-weights",
                f"{self.folder} lacks {', '.join(missing)}",
                wanted="weights as safetensors",
                fix="download the checkpoint again; .bin files are not read",
            )
        return [self.folder / name for name in names]


def open_checkpoint(
    folder: Path, *, block_width: int | None = None, mask_id: int | None = None, max_positions: int | None = None
) -> Checkpoint:
    """Read everything but the weights. Arguments override what the checkpoint says or leaves open.

    Raises:
        SpotDeployError: no checkpoint, an unknown family, or ids and sizes that contradict each other.
    """
    if not (folder / "config.json").is_file():
        raise SpotDeployError(
            "checkpoint-missing",
            f"{folder} is not a checkpoint",
            wanted="a Hugging Face folder with config.json, model.safetensors and tokenizer.json",
            fix="give the folder of a downloaded checkpoint",
        )
    config = _read_object(folder / "config.json")
    family = find_family(config)
    try:
        spec = family.spec(config)
    except (KeyError, ValueError, TypeError) as error:
        raise SpotDeployError("checkpoint-config", "config.json is incomplete", seen=repr(error), fix=FIX) from error
    generation_path = folder / "generation_config.json"
    generation = _read_object(generation_path) if generation_path.is_file() else {}
    try:
        decoding = _decoding(
            config, generation, family, spec, folder.resolve().name, block_width, mask_id, max_positions
        )
    except (ValueError, TypeError) as error:
        raise SpotDeployError(
            "checkpoint-decoding",
            "cannot tell how this checkpoint is decoded",
            seen=str(error),
            fix="set --block-width, --mask-id or --max-positions",
        ) from error
    text = Text(folder, decoding.reserved)
    if text.size > spec.vocab:
        raise SpotDeployError(
            "checkpoint-tokenizer",
            "the tokenizer has more ids than the model",
            seen=f"{text.size} ids",
            wanted=f"at most {spec.vocab}",
            fix="use the tokenizer that belongs to the checkpoint",
        )
    banned = torch.ones(spec.vocab, dtype=torch.bool)
    banned[list(text.known_ids())] = False
    banned[decoding.mask_id] = True
    return Checkpoint(folder, config, family, spec, decoding, banned)


def _read_object(path: Path) -> dict[str, Any]:
    document = read_json(path, code="checkpoint-config", fix=FIX)
    if not isinstance(document, dict):
        raise SpotDeployError("checkpoint-config", f"{path.name} is no JSON object", fix=FIX)
    return document


def _decoding(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    family: Family,
    spec: DecoderSpec,
    name: str,
    block_width: int | None,
    mask_id: int | None,
    max_positions: int | None,
) -> Decoding:
    """The manifest's decoding section; ValueError or TypeError where the checkpoint makes no sense."""
    width = block_width or family.block_width(config, name)
    if not 1 <= width <= 64:
        raise ValueError(f"block width {width} is not within 1..64")
    stops = generation.get("eos_token_id", config.get("eos_token_id"))
    capacity = max_positions or min(config.get("max_position_embeddings") or MAX_POSITIONS, MAX_POSITIONS)
    capacity = capacity // width * width
    return Decoding(
        block_width=width,
        mask_id=next(i for i in (mask_id, config.get("mask_token_id"), family.mask_id) if i is not None),
        stop_ids=tuple(stops if isinstance(stops, list) else [stops]),
        bos_id=generation.get("bos_token_id", config.get("bos_token_id")),
        confidence=family.confidence,
        logit_shift=0,
        max_positions=capacity,
        buckets=default_buckets(width, capacity),
        prefill_positions=max(width, PREFILL_POSITIONS // width * width),
        exact_cache=True,
        shape=TargetShape(spec.layers, spec.kv_heads, spec.head_dim, spec.vocab, family.confidence == "raw"),
    )
