"""LLaDA-MoE-7B-A1B: softmax routing without renormalisation, per-head norms, full attention (ZHZisZZ/dllm, llada).

Natively it is Qwen3-MoE. A checkpoint with an expert bias, which no native class has, is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spot_deploy.export.decoder import DecoderSpec, MoeSpec
from spot_deploy.export.families.family import (
    PARTS,
    Config,
    Family,
    Source,
    hugging_face_spec,
    native_config,
    require,
    sources,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _spec(config: Config) -> DecoderSpec:
    require(
        config,
        {
            "attention_bias": False,
            "clip_qkv": None,
            "moe_router_score_function": "softmax",
            "moe_router_enable_expert_bias": False,
            "shared_expert_intermediate_size": None,
            "qk_layernorm": True,
        },
    )
    frequency = config.get("moe_layer_freq") or [1] * config["num_hidden_layers"]
    moe = MoeSpec(
        experts=config["num_experts"],
        per_token=config["num_experts_per_tok"],
        intermediate=config["expert_intermediate_size"],
        dense_layers=frozenset(i for i, is_moe in enumerate(frequency) if not is_moe),
        normalised=False,
    )
    if config.get("partial_rotary_factor") not in (None, 1, -1):  # -1: the published class's own default
        require(config, {"partial_rotary_factor": 1})
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    dense = config.get("dense_intermediate_size") or moe.intermediate
    renamed = dict(config) | {"intermediate_size": dense, "head_dim": head_dim}
    return hugging_face_spec(
        renamed,
        qk_norm=True,
        moe=moe,
    )


def _sources(spec: DecoderSpec) -> dict[str, Source]:
    return sources(spec, parts=PARTS | {"expert_bias": "mlp.expert_bias"})


def _native(config: Config, layers: int) -> PreTrainedModel:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    frequency = config.get("moe_layer_freq") or [1] * config["num_hidden_layers"]
    changes = {
        "moe_intermediate_size": config["expert_intermediate_size"],
        "intermediate_size": config.get("dense_intermediate_size") or config["expert_intermediate_size"],
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, is_moe in enumerate(frequency[:layers]) if not is_moe],
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**native_config(config, layers, **changes)))


LLADA_MOE = Family(
    name="llada-moe",
    architectures=("LLaDAMoEModelLM", "LLaDAMoEModel"),
    model_types=("lladamoe",),
    spec=_spec,
    sources=_sources,
    native=_native,
    mask_id=156895,
    stop_ids=(156892,),
    block_width=32,
    confidence="raw",
    attention="full",
)
