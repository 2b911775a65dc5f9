"""LLaDA2.0-mini and -flash: a Ling-style mixture of experts with block-causal attention (inclusionAI's modeling file).

Sigmoid scores, a bias for the choice alone, experts of the best groups only, a shared expert, queries, keys and values
in one matrix, half of every head rotated. Natively it is Glm4-MoE.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from spot_deploy.export.decoder import DecoderSpec, MoeSpec
from spot_deploy.export.families.family import (
    ENDS,
    PARTS,
    Config,
    Family,
    Fields,
    Source,
    hugging_face_spec,
    native_config,
    require,
    rope_theta,
    sources,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PARTS = PARTS | {
    "q_norm.weight": "attention.query_layernorm.weight",
    "k_norm.weight": "attention.key_layernorm.weight",
    "o.weight": "attention.dense.weight",
}
_FUSED = "attention.query_key_value.weight"


def _spec(config: Config) -> DecoderSpec:
    if config.get("_moe_implementation") == "fused":
        require(config, {"_moe_implementation": "eager"})  # its experts are stored in one tensor
    require(
        config,
        {
            "use_bias": False,
            "use_qkv_bias": False,
            "norm_head": False,
            "score_function": "sigmoid",
            "norm_topk_prob": True,
            "use_qk_norm": True,
            "moe_router_enable_expert_bias": True,
        },
    )
    moe = MoeSpec(
        experts=config["num_experts"],
        per_token=config["num_experts_per_tok"],
        intermediate=config["moe_intermediate_size"],
        shared_intermediate=config["moe_intermediate_size"] * (config.get("num_shared_experts") or 0),
        dense_layers=frozenset(range(config.get("first_k_dense_replace") or 0)),
        scoring="sigmoid",
        expert_bias=True,
        groups=config["n_group"],
        groups_kept=config["topk_group"],
        normalised=config["num_experts_per_tok"] > 1,
        scale=float(config["routed_scaling_factor"]),
    )
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotated = int(head_dim * _rotated_share(config))
    return hugging_face_spec(Fields(config) | {"head_dim": head_dim}, qk_norm=True, moe=moe, rotary_dim=rotated)


def _rotated_share(config: Config) -> float:
    """0.5 unless said otherwise, as the published config class has it."""
    rope = config.get("rope_parameters") or {}
    return float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 0.5)


def _sources(spec: DecoderSpec) -> dict[str, Source]:
    found = sources(spec, parts=_PARTS, ends=ENDS | {"embed.weight": "model.word_embeddings.weight"})
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    rows = {"q": (0, queries), "k": (queries, queries + keys), "v": (queries + keys, queries + 2 * keys)}
    for number in range(spec.layers):
        for kind, part in rows.items():
            found[f"layers.{number}.{kind}.weight"] = Source((f"model.layers.{number}.{_FUSED}",), rows=part)
    return found


def _native(config: Config, layers: int) -> PreTrainedModel:
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    rope = {
        "rope_type": "default",
        "rope_theta": rope_theta(config),
        "partial_rotary_factor": _rotated_share(config),
    }
    changes = {
        "rope_parameters": rope,
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": config.get("num_shared_experts") or 0,
        "use_qk_norm": True,
        "norm_topk_prob": True,
        "attention_bias": False,
        "first_k_dense_replace": config.get("first_k_dense_replace") or 0,
    }
    settings = native_config(config, layers, **changes)
    for gone in ("num_experts", "num_shared_experts", "rope_theta", "partial_rotary_factor", "rope_scaling"):
        settings.pop(gone, None)
    return Glm4MoeForCausalLM(Glm4MoeConfig(**settings))


def _refused(config: Config, name: str) -> str | None:
    for text in (name, str(config.get("_name_or_path", ""))):
        if re.search(r"llada[-_ ]?v?2[._]?[1-9]", text, re.IGNORECASE):
            return (
                "LLaDA2.1 and later rewrite tokens that are already placed; SPOT drafts states in which a placed token "
                "stays"
            )
    return None


LLADA2 = Family(
    name="llada2",
    architectures=("LLaDA2MoeModelLM",),
    model_types=("llada2_moe",),
    spec=_spec,
    sources=_sources,
    native=_native,
    mask_id=156895,
    stop_ids=(156892,),
    block_width=32,
    refused=_refused,
)
