"""Checkpoint families: from a published config and tensor names to the one decoder.

Facts and sources: SDAR is Qwen3 under another class name (JetAstra/SDAR, training/model; logits equal to the native
class to the last bit); LLaDA is Llama with OLMo's names (ML-GSAI/LLaDA). No remote code is ever loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.export.decoder import DecoderSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """One published architecture.

    Attributes:
        name: short name, in the manifest.
        architectures, model_types: what its config.json says; the former is looked at first.
        spec: config to decoder shape.
        tensor_names: our parameter names to the checkpoint's.
        native: config and number of layers to the native transformers class, the parity oracle, weights not loaded.
        mask_id: the family's mask id, where the config is silent.
        default_width: block width, where config and name are silent.
        confidence: `tempered` or `raw`.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    spec: Callable[[Config], DecoderSpec]
    tensor_names: Callable[[DecoderSpec], dict[str, str]]
    native: Callable[[Config, int], PreTrainedModel]
    mask_id: int
    default_width: int
    confidence: str

    def block_width(self, config: Config, folder_name: str) -> int:
        """From the config, else from a name ending in -bN (JetLM's convention), else the default."""
        if isinstance(config.get("block_size"), int):
            return int(config["block_size"])
        named = re.search(r"-b(\d+)$", folder_name)
        return int(named[1]) if named else self.default_width


def _refuse(config: Config, wanted: Mapping[str, Any]) -> None:
    """Raise where the config asks for something that the decoder does not do."""
    for key, value in wanted.items():
        if config.get(key, value) not in (value, None):
            raise SpotDeployError(
                "checkpoint-unsupported",
                "the checkpoint uses a feature that export does not know",
                seen=f"{key} = {config[key]!r}",
                wanted=f"{key} = {value!r}",
                fix="report the checkpoint's name",
            )


def _qwen3_spec(config: Config) -> DecoderSpec:
    _refuse(
        config,
        {"attention_bias": False, "hidden_act": "silu", "rope_scaling": None, "use_sliding_window": False},
    )
    rope = config.get("rope_parameters") or {}
    _refuse({"rope_type": rope.get("rope_type", "default")}, {"rope_type": "default"})
    return DecoderSpec(
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate=config["intermediate_size"],
        rope_theta=float(rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"]),
        norm_eps=float(config["rms_norm_eps"]),
        qk_norm=True,
        tied_head=bool(config.get("tie_word_embeddings", False)),
    )


def _native_qwen3(config: Config, layers: int) -> PreTrainedModel:
    """Read from the checkpoint's own config by transformers, so that a field misread above shows in the gates."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    other = ("architectures", "model_type", "auto_map", "transformers_version", "torch_dtype", "dtype")
    settings = {key: value for key, value in config.items() if key not in other}
    settings |= {"num_hidden_layers": layers, "layer_types": None, "attn_implementation": "eager"}
    return Qwen3ForCausalLM(Qwen3Config(**settings))


def qwen3_tensor_names(spec: DecoderSpec) -> dict[str, str]:
    """Our parameter names to those of Qwen3 and SDAR checkpoints."""
    names = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not spec.tied_head:
        names["head.weight"] = "lm_head.weight"
    parts = {
        "input_norm": "input_layernorm",
        "post_norm": "post_attention_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    return names | _layer_names(spec, "model.layers", parts)


def llada_tensor_names(spec: DecoderSpec) -> dict[str, str]:
    """Our parameter names to those of LLaDA checkpoints."""
    names = {
        "embed.weight": "model.transformer.wte.weight",
        "norm.weight": "model.transformer.ln_f.weight",
    }
    if not spec.tied_head:
        names["head.weight"] = "model.transformer.ff_out.weight"
    parts = {
        "input_norm": "attn_norm",
        "post_norm": "ff_norm",
        "q": "q_proj",
        "k": "k_proj",
        "v": "v_proj",
        "o": "attn_out",
        "gate": "ff_proj",
        "up": "up_proj",
        "down": "ff_out",
    }
    return names | _layer_names(spec, "model.transformer.blocks", parts)


def _layer_names(spec: DecoderSpec, prefix: str, parts: dict[str, str]) -> dict[str, str]:
    return {
        f"layers.{i}.{own}.weight": f"{prefix}.{i}.{theirs}.weight"
        for i in range(spec.layers)
        for own, theirs in parts.items()
        if spec.qk_norm or not own.endswith(("q_norm", "k_norm"))
    }


SDAR = Family(
    name="sdar",
    architectures=("SDARForCausalLM",),
    model_types=("sdar",),
    spec=_qwen3_spec,
    tensor_names=qwen3_tensor_names,
    native=_native_qwen3,
    mask_id=151669,
    default_width=4,
    confidence="tempered",
)
FAMILIES = (SDAR,)


def find_family(config: Config) -> Family:
    """The family of a config.json, by `architectures[0]`, then `model_type`.

    Raises:
        SpotDeployError: none that export knows.
    """
    architecture = (config.get("architectures") or [None])[0]
    model_type = config.get("model_type")
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    for family in FAMILIES:
        if architecture is None and model_type in family.model_types:
            return family
    raise SpotDeployError(
        "checkpoint-family",
        "export does not know this architecture",
        seen=f"architectures {config.get('architectures')!r}, model_type {model_type!r}",
        wanted=", ".join(name for family in FAMILIES for name in family.architectures),
        fix="use a checkpoint of one of these families",
    )
