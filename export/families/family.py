"""What a checkpoint family is: how its config and tensor names map to the one decoder, and how it is decoded."""

from __future__ import annotations

import atexit
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.export.decoder import Decoder, DecoderSpec, MoeSpec
from spot_deploy.export.families.fields import Fields

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Config = Mapping[str, Any]
__all__ = ["Config", "Family", "Fields", "Source"]


@dataclass(frozen=True)
class Source:
    """Where one of our parameters comes from.

    Attributes:
        names: published tensors; several are joined along `axis`.
        rows: the part of the (only) tensor's first axis that is taken; None: all of it.
    """

    names: tuple[str, ...]
    axis: int = 0
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class Family:
    """One published architecture.

    Attributes:
        name: short name, in the manifest.
        architectures, model_types: what its config.json says; the former is looked at first.
        spec: config to decoder shape.
        sources: our parameters to the checkpoint's.
        native: config and number of layers to the native transformers class, the parity oracle, weights not loaded.
        mask_id: where the config is silent; None: the tokenizer's mask token, or --mask-id.
        stop_ids: where generation_config.json and the config are silent.
        block_width: where config and name are silent; None: --block-width must tell.
        confidence: `tempered` or `raw`.
        attention: `block-causal` or `full`.
        logit_shift: 1 where row p - 1 predicts position p.
        given_start: the first token of a block comes from the pass that stores the block before.
        width_keys: fields of the config that may hold the block width.
        position_keys: fields that may hold the capacity in positions.
        fits: whether a folder's name fits, where several families have an architecture.
        refused: why a checkpoint that looks like this family cannot be decoded (config, folder name), or None.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    spec: Callable[[Config], DecoderSpec]
    sources: Callable[[DecoderSpec], dict[str, Source]]
    native: Callable[[Config, int], PreTrainedModel]
    mask_id: int | None
    block_width: int | None
    confidence: str = "tempered"
    attention: str = "block-causal"
    logit_shift: int = 0
    given_start: bool = False
    stop_ids: tuple[int, ...] = ()
    width_keys: tuple[str, ...] = ("block_size", "block_length")
    position_keys: tuple[str, ...] = ("max_position_embeddings",)
    fits: Callable[[str], bool] = lambda name: True
    refused: Callable[[Config, str], str | None] = lambda config, name: None

    def width(self, config: Config, folder_name: str) -> tuple[int, str]:
        """From the config or from -bN in the name (JetLM's convention), else the default; and which of them told.

        Raises:
            ValueError: none of them tells, or they contradict each other.
        """
        told = {key: config[key] for key in self.width_keys if config.get(key) is not None}
        for number in re.findall(r"[-_]b(\d+)(?=[-_.\s]|$)", folder_name, re.IGNORECASE):
            told[f"-b{int(number)} in the name"] = int(number)
        if len(set(told.values())) > 1:
            said = ", ".join(key if key.startswith("-") else f"{key} {width}" for key, width in told.items())
            raise ValueError(f"the block width is told in contradicting ways: {said}")
        if told:
            return next((width, key) for key, width in told.items())
        if self.block_width is None:
            raise ValueError(f"neither the config nor the name tells the block width of a {self.name} checkpoint")
        return self.block_width, "what such checkpoints have where neither config nor name tells"


def require(config: Config, wanted: Mapping[str, Any]) -> None:
    """Check that what the decoder does not do is not asked for.

    Raises:
        SpotDeployError: a field has another value.
    """
    for key, value in wanted.items():
        if config.get(key, value) not in (value, None):
            raise SpotDeployError(
                "checkpoint-unsupported",
                "the checkpoint uses a feature that export does not know",
                seen=f"{key} = {config[key]!r}",
                wanted=f"{key} = {value!r}",
                fix="report the checkpoint's name",
            )


def rope_theta(config: Config) -> float:
    """The base of plain rotary embeddings, from either spelling of the config."""
    for key in ("rope_parameters", "rope_scaling"):
        told = config.get(key) or {}
        kind = told.get("rope_type", told.get("type", "default" if "factor" not in told else "scaled"))
        require({f"{key}.rope_type": kind}, {f"{key}.rope_type": "default"})
    rope = config.get("rope_parameters") or {}
    return float(rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"])


def hugging_face_spec(config: Config, *, qk_norm: bool, qkv_bias: bool = False, **more: Any) -> DecoderSpec:
    """The shape by the field names that most configs share; `more` are further fields of DecoderSpec.

    Only where queries and keys have no norms is head_dim hidden / heads by default, as the native classes have it.
    """
    require(config, {"hidden_act": "silu", "use_sliding_window": False})
    heads = config["num_attention_heads"]
    return DecoderSpec(
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config["head_dim"] if qk_norm else config.get("head_dim") or config["hidden_size"] // heads,
        intermediate=config["intermediate_size"],
        rope_theta=rope_theta(config),
        norm_eps=float(config["rms_norm_eps"]),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        tied_head=bool(config.get("tie_word_embeddings", False)),
        **more,
    )


# Our names of a layer's parameters to those that most checkpoints use.
PARTS = {
    "input_norm.weight": "input_layernorm.weight",
    "post_norm.weight": "post_attention_layernorm.weight",
    **{f"{x}.{kind}": f"self_attn.{x}_proj.{kind}" for x in "qkv" for kind in ("weight", "bias")},
    "o.weight": "self_attn.o_proj.weight",
    "q_norm.weight": "self_attn.q_norm.weight",
    "k_norm.weight": "self_attn.k_norm.weight",
    **{f"{x}.weight": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    "router.weight": "mlp.gate.weight",
    "expert_bias": "mlp.gate.expert_bias",
    **{f"shared_{x}.weight": f"mlp.shared_experts.{x}_proj.weight" for x in ("gate", "up", "down")},
}
ENDS = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def sources(
    spec: DecoderSpec,
    *,
    parts: Mapping[str, str] = PARTS,
    ends: Mapping[str, str] = ENDS,
    layer: str = "model.layers",
    experts: str = "mlp.experts",
) -> dict[str, Source]:
    """Our parameters to published tensors, one to one but for experts: those of a layer stand side by side.

    Args:
        parts: our names of a layer's parameters to those after the layer's number; more than the spec has are left out.
        ends: our names of the others to the published ones.
        layer: what comes before a layer's number.
        experts: what comes before an expert's number, after the layer's.
    """
    found = {}
    for name, _ in Decoder.shapes(spec):
        if not name.startswith("layers."):
            found[name] = Source((ends[name],))
            continue
        _, number, part = name.split(".", 2)
        moe = spec.moe_at(int(number))
        if moe is not None and part in ("gate.weight", "up.weight", "down.weight"):
            kind = part.removesuffix(".weight")
            names = tuple(f"{layer}.{number}.{experts}.{e}.{kind}_proj.weight" for e in range(moe.experts))
            found[name] = Source(names, axis=1 if kind == "down" else 0)
        else:
            found[name] = Source((f"{layer}.{number}.{parts[part]}",))
    return found


def published_shapes(spec: DecoderSpec, found: Mapping[str, Source]) -> dict[str, tuple[int, ...]]:
    """Shapes of the checkpoint's tensors, from where our parameters come from."""
    shapes: dict[str, tuple[int, ...]] = {}
    for own, shape in Decoder.shapes(spec):
        source, part = found[own], list(shape)
        if source.rows is not None:
            part[0] = max(source.rows[1], shapes.get(source.names[0], (0,))[0])
        else:
            part[source.axis] //= len(source.names)
        shapes |= dict.fromkeys(source.names, tuple(part))
    return shapes


def convert_tokenizer(folder: Path) -> Path:
    """A folder with tokenizer.json made by transformers from a Qwen2 tokenizer's vocab.json and merges.txt.

    It is removed when the process ends.
    """
    from transformers import Qwen2Tokenizer

    made = tempfile.TemporaryDirectory(prefix="spot-deploy-tokenizer-")
    atexit.register(made.cleanup)
    Qwen2Tokenizer.from_pretrained(folder).save_pretrained(made.name)
    return Path(made.name)


def native_config(config: Config, layers: int, **changes: Any) -> dict[str, Any]:
    """Settings for a native config class, from the checkpoint's own config, so that a field that is misread here shows
    in the parity gates."""
    other = ("architectures", "model_type", "auto_map", "transformers_version", "torch_dtype", "dtype")
    settings = {key: value for key, value in config.items() if key not in other}
    settings = {key: value for key, value in settings.items() if value is not None}
    return settings | {"num_hidden_layers": layers, "layer_types": None, "attn_implementation": "eager"} | changes


def native_weights(spec: DecoderSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our tensors under the names that the native transformers classes share; experts as they stack them."""
    parts = PARTS | {"expert_bias": "mlp.gate.e_score_correction_bias"}
    weights = {}
    for name, source in sources(spec, parts=parts).items():
        if len(source.names) == 1:
            weights[source.names[0]] = tensors[name]
    for number in range(spec.layers):
        if (moe := spec.moe_at(number)) is not None:
            weights |= _native_experts(number, moe, spec.hidden, tensors)
    if spec.tied_head:
        weights["lm_head.weight"] = tensors["embed.weight"]
    return weights


def _native_experts(
    number: int, moe: MoeSpec, hidden: int, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    import torch

    own, theirs = f"layers.{number}", f"model.layers.{number}.mlp.experts"
    gate, up = (tensors[f"{own}.{x}.weight"].view(moe.experts, moe.intermediate, hidden) for x in ("gate", "up"))
    down = tensors[f"{own}.down.weight"].view(hidden, moe.experts, moe.intermediate).permute(1, 0, 2)
    return {f"{theirs}.gate_up_proj": torch.cat((gate, up), 1), f"{theirs}.down_proj": down.contiguous()}
