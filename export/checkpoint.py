"""Reading a Hugging Face folder: config, ids, tokenizer, weights. safetensors only; no pickle, no remote code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from spot_deploy.engines.contracts import TargetShape
from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.engines.files import read_json, safetensors_header
from spot_deploy.export.decoder import DecoderSpec
from spot_deploy.export.families import Family, Fields, Source, find_family
from spot_deploy.export.families.family import convert_tokenizer, published_shapes
from spot_deploy.export.families.fields import check_fields
from spot_deploy.runtime.manifest import Decoding, default_buckets
from spot_deploy.runtime.text import TOKENIZER, Text

MAX_POSITIONS, PREFILL_POSITIONS = 32768, 512
# Dtypes of published weights to those they are kept in.
READ = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float32}
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".safetensors")
FULL_POSITIONS = 4096  # of targets with full attention, whose passes run whole sequences
FIX = "download the checkpoint again"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that can be exported; weights are not read yet.

    Attributes:
        name: what it is called: by its folder, a link to it, or the hub's cache.
        text_folder: holds tokenizer.json.
        banned: ids that may never be sampled: the mask, and what the tokenizer cannot decode; bool [vocab].
        width_from: what told the block width.
    """

    folder: Path
    name: str
    text_folder: Path
    config: Mapping[str, Any]
    family: Family
    spec: DecoderSpec
    decoding: Decoding
    banned: torch.Tensor
    width_from: str

    @cached_property
    def _places(self) -> dict[str, tuple[Path, str, tuple[int, ...]]]:
        """File, dtype and shape of every published tensor, from the files' headers.

        Raises:
            SpotDeployError: a file cannot be read, or its header says more than there is.
        """
        found: dict[str, tuple[Path, str, tuple[int, ...]]] = {}
        for file in self._weight_files():
            try:
                begin, entries = safetensors_header(file)
                end = begin + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
                if file.stat().st_size != end:
                    raise ValueError(f"{file.stat().st_size} bytes in place of {end}")
                for name, entry in entries.items():
                    if name in found:
                        raise ValueError(f"{name} is in {found[name][0].name} as well")
                    found[name] = (file, str(entry["dtype"]), tuple(entry["shape"]))
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise SpotDeployError("checkpoint-weights", f"cannot read {file}", seen=str(error), fix=FIX) from error
        return found

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype that each of our parameters is kept in: the checkpoint's own, of float32, float16 and bfloat16.

        Everything is checked that can be known without reading a weight.

        Raises:
            SpotDeployError: tensors are missing or left over, shapes do not fit, or a dtype is one that is not read.
        """
        places, sources = self._places, self._sources
        used = {name for source in sources.values() for name in source.names}
        missing = sorted(used - set(places))
        tied = self._unused_head()
        extra = {name for name in places if name.endswith("rotary_emb.inv_freq")}  # old files hold what is computed
        unknown = sorted(set(places) - used - extra - ({tied} if tied else set()))
        odd = sorted(f"{n} is {places[n][1]}" for n in used & set(places) if places[n][1] not in READ)
        if odd:
            raise SpotDeployError(
                "checkpoint-dtype",
                "the checkpoint's weights are in a dtype that export does not read",
                seen="; ".join(odd[:5]) + (f" ({len(odd)})" if len(odd) > 5 else ""),
                wanted=", ".join(READ),
                fix="use the checkpoint that is not quantised; export quantises itself (--precisions)",
            )
        wrong = [
            f"{name}: {list(places[name][2])} in place of {list(shape)}"
            for name, shape in (published_shapes(self.spec, sources) | self._head_shape(tied)).items()
            if name in places and places[name][2] != shape
        ]
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
        return {own: READ[places[source.names[0]][1]] for own, source in sources.items()}

    def _unused_head(self) -> str | None:
        """The head's tensor, where the head is tied and some files hold it all the same."""
        if not self.spec.tied_head:
            return None
        return self.family.sources(replace(self.spec, tied_head=False))["head.weight"].names[0]

    def _head_shape(self, name: str | None) -> dict[str, tuple[int, ...]]:
        return {name: (self.spec.vocab, self.spec.hidden)} if name else {}

    def check_tied_head(self) -> None:
        """Check that a tied head which the files hold all the same is the embedding.

        Raises:
            SpotDeployError: it is not, so that one of config and files is wrong (transformers believes the files).
        """
        name = self._unused_head()
        if not self.dtypes or name is None or name not in self._places:
            return
        embedding = self._sources["embed.weight"].names[0]
        with (
            safe_open(self._places[name][0], "pt") as heads,
            safe_open(self._places[embedding][0], "pt") as embeddings,
        ):
            head, embed = heads.get_slice(name), embeddings.get_slice(embedding)
            for start in range(0, self.spec.vocab, 8192):
                if not torch.equal(head[start : start + 8192], embed[start : start + 8192]):
                    raise SpotDeployError(
                        "checkpoint-tied",
                        "the config says that the head is the embedding, and the weights hold another one",
                        seen=f"{name} and {embedding} differ at rows {start} and on",
                        wanted="equal tensors, or only one of them",
                        fix="set tie_word_embeddings (weight_tying) to false if the head is meant, else leave it out",
                    )

    @cached_property
    def _sources(self) -> dict[str, Source]:
        return self.family.sources(self.spec)

    def tensor(self, own: str) -> torch.Tensor:
        """One of our parameters, in the dtype of `dtypes`.

        Raises:
            SpotDeployError: as `dtypes`, or the file is damaged.
        """
        dtype, source = self.dtypes[own], self._sources[own]
        files: dict[Path, list[int]] = {}
        for index, name in enumerate(source.names):
            files.setdefault(self._places[name][0], []).append(index)
        whole: torch.Tensor | None = None
        for file, indices in files.items():
            try:
                # Opened anew each time: what was mapped is let go, and memory stays that of one tensor.
                with safe_open(file, "pt") as tensors:
                    if source.rows is not None:
                        return tensors.get_slice(source.names[0])[source.rows[0] : source.rows[1]].to(dtype)
                    if len(source.names) == 1:
                        return tensors.get_tensor(source.names[0]).to(dtype)
                    for index in indices:
                        part = tensors.get_tensor(source.names[index])
                        if whole is None:
                            shape = list(part.shape)
                            shape[source.axis] *= len(source.names)
                            whole = torch.empty(shape, dtype=dtype)
                        size = part.shape[source.axis]
                        whole.narrow(source.axis, index * size, size).copy_(part)
            except (OSError, SafetensorError) as error:
                raise SpotDeployError("checkpoint-weights", f"cannot read {file}", seen=str(error), fix=FIX) from error
        assert whole is not None
        return whole

    def tensors(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """All weights whose name begins with `prefix`, in float32 under our names; raises as `tensor`."""
        return {own: self.tensor(own).float() for own in self.dtypes if own.startswith(prefix)}

    def _weight_files(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            document = read_json(index, code="checkpoint-index", fix=FIX)
            try:
                names = sorted(set(document["weight_map"].values()))
                if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
                    raise ValueError(f"weight_map names {names[:3]}, not files of this folder")
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise SpotDeployError(
                    "checkpoint-index", f"{index.name} has no weight_map that can be used", seen=repr(error), fix=FIX
                ) from error
            if "model.safetensors" not in names and (self.folder / "model.safetensors").is_file():
                raise SpotDeployError(
                    "checkpoint-weights",
                    "the checkpoint holds its weights twice, and they may differ",
                    seen=f"model.safetensors, and {index.name} with {len(names)} other files",
                    fix="delete whichever is old",
                )
        else:
            names = ["model.safetensors"]
        missing = [name for name in names if not (self.folder / name).is_file()]
        if missing:
            raise SpotDeployError(
                "checkpoint-weights",
                f"{self.folder} lacks {', '.join(missing)}",
                seen=", ".join(sorted(p.name for p in self.folder.iterdir() if p.suffix in OTHER_WEIGHTS)[:9])
                or "none",
                wanted="weights as safetensors",
                fix="download the safetensors files, with their index if they are several; pickles are never read",
            )
        return [self.folder / name for name in names]


def open_checkpoint(
    folder: Path,
    *,
    block_width: int | None = None,
    mask_id: int | None = None,
    stop_ids: tuple[int, ...] | None = None,
    max_positions: int | None = None,
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
    config = Fields(_read_object(folder / "config.json"))
    check_fields(config, "config.json")
    if config.get("quantization_config") is not None:
        raise SpotDeployError(
            "checkpoint-quantised",
            "the checkpoint's weights are quantised",
            seen=f"quantization_config {config['quantization_config']!r:.100}",
            wanted="weights as they were trained",
            fix="use the checkpoint that is not quantised; export quantises itself (--precisions)",
        )
    names = _names(folder)
    family = find_family(config, " ".join(names))
    try:
        spec = family.spec(config)
    except (KeyError, ValueError, TypeError, ZeroDivisionError) as error:
        raise SpotDeployError(
            "checkpoint-config",
            f"config.json does not describe a {family.name} network",
            seen=str(error),
            fix="compare it with the published one",
        ) from error
    generation_path = folder / "generation_config.json"
    generation = _read_object(generation_path) if generation_path.is_file() else {}
    check_fields(generation, generation_path.name)
    try:
        width, told_by = (block_width, "--block-width") if block_width else family.width(config, " ".join(names))
        if not 1 <= width <= 64:
            raise ValueError(f"block width {width} ({told_by}) is not within 1..64")
        decoding = Decoding(
            block_width=width,
            mask_id=_mask_id(config, family, folder) if mask_id is None else mask_id,
            stop_ids=stop_ids or _stop_ids(config, generation, family),
            bos_id=next((d["bos_token_id"] for d in (generation, config) if d.get("bos_token_id") is not None), None),
            **_sizes(config, family, spec, width, max_positions),
        )
    except (ValueError, TypeError) as error:
        raise SpotDeployError(
            "checkpoint-decoding",
            "cannot tell how this checkpoint is decoded",
            seen=str(error),
            fix="set --block-width, --mask-id, --stop-ids or --max-positions",
        ) from error
    text_folder = _text_folder(folder)
    text = Text(text_folder, decoding.reserved, fix=f"{FIX}, or give the files that belong to it")
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
    return Checkpoint(folder, names[0], text_folder, config, family, spec, decoding, banned, told_by)


def _names(folder: Path) -> list[str]:
    """What a checkpoint may be called; the hub's cache keeps a model's name two folders above its files."""
    hub = re.fullmatch(r"models--.+?--(.+)", folder.resolve().parent.parent.name)
    found = [*([hub[1]] if hub else []), folder.absolute().name, folder.resolve().name]
    return list(dict.fromkeys(found))


def _text_folder(folder: Path) -> Path:
    """A folder with tokenizer.json: the checkpoint's own, or one made from vocab.json and merges.txt (Dream).

    Raises:
        SpotDeployError: there is neither.
    """
    if (folder / TOKENIZER).is_file():
        return folder
    if not all((folder / name).is_file() for name in ("vocab.json", "merges.txt")):
        raise SpotDeployError(
            "checkpoint-tokenizer",
            f"{folder} has no tokenizer that can be read",
            wanted=f"{TOKENIZER}, or vocab.json and merges.txt",
            fix=FIX,
        )
    return convert_tokenizer(folder)


def _read_object(path: Path) -> dict[str, Any]:
    document = read_json(path, code="checkpoint-config", fix=FIX)
    if not isinstance(document, dict):
        raise SpotDeployError("checkpoint-config", f"{path.name} is no JSON object", fix=FIX)
    return document


def _stop_ids(config: Mapping[str, Any], generation: Mapping[str, Any], family: Family) -> tuple[int, ...]:
    """The first that says something.

    Raises:
        ValueError: none does.
    """
    for stated in (generation.get("eos_token_id"), config.get("eos_token_id"), list(family.stop_ids)):
        if stated not in (None, []):
            return tuple(stated if isinstance(stated, list) else [stated])
    raise ValueError("neither generation_config.json nor config.json has an eos_token_id")


def _sizes(
    config: Mapping[str, Any], family: Family, spec: DecoderSpec, width: int, max_positions: int | None
) -> dict[str, Any]:
    """The rest of the manifest's decoding section."""
    stated = next((config[key] for key in family.position_keys if config.get(key) is not None), MAX_POSITIONS)
    most = MAX_POSITIONS if family.attention == "block-causal" else FULL_POSITIONS
    capacity = (max_positions or min(stated, most)) // width * width
    return {
        "confidence": family.confidence,
        "attention": family.attention,
        "logit_shift": family.logit_shift,
        "given_start": family.given_start,
        "max_positions": capacity,
        "buckets": default_buckets(width, capacity),
        "prefill_positions": max(width, PREFILL_POSITIONS // width * width),
        "shape": TargetShape(spec.layers, spec.kv_heads, spec.head_dim, spec.vocab, family.confidence == "raw"),
    }


def _mask_id(config: Mapping[str, Any], family: Family, folder: Path) -> int:
    """From the config, the family, or the tokenizer's mask token.

    Raises:
        ValueError: none of them tells.
    """
    for known in (config.get("mask_token_id"), family.mask_id):
        if known is not None:
            return int(known)
    settings, tokenizer = (folder / name for name in ("tokenizer_config.json", TOKENIZER))
    token = _read_object(settings).get("mask_token") if settings.is_file() else None
    text = token.get("content") if isinstance(token, dict) else token
    if text and tokenizer.is_file():
        added = {entry["content"]: entry["id"] for entry in _read_object(tokenizer).get("added_tokens") or ()}
        if text in added:
            return int(added[text])
    raise ValueError("neither the config, nor the family, nor the tokenizer tells the mask id")
