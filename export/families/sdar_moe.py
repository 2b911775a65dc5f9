"""SDAR-30B-A3B: Qwen3-MoE under another class name (InternLM/lmdeploy, sdar_moe.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spot_deploy.export.decoder import DecoderSpec, MoeSpec
from spot_deploy.export.families.family import Config, Family, hugging_face_spec, native_config, require, sources
from spot_deploy.export.families.sdar import MASK_ID, STOP_IDS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _moe_spec(config: Config) -> DecoderSpec:
    require(config, {"attention_bias": False})
    layers, every = config["num_hidden_layers"], config.get("decoder_sparse_step") or 1
    dense = frozenset(config.get("mlp_only_layers") or ()) | {i for i in range(layers) if (i + 1) % every}
    moe = MoeSpec(
        experts=config["num_experts"],
        per_token=config["num_experts_per_tok"],
        intermediate=config["moe_intermediate_size"],
        dense_layers=dense,
        normalised=bool(config["norm_topk_prob"]),
    )
    return hugging_face_spec(config, qk_norm=True, moe=moe)


def native_qwen3_moe(config: Config, layers: int) -> PreTrainedModel:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**native_config(config, layers)))


SDAR_MOE = Family(
    name="sdar-moe",
    architectures=("SDARMoeForCausalLM",),
    model_types=("sdar_moe",),
    spec=_moe_spec,
    sources=sources,
    native=native_qwen3_moe,
    mask_id=MASK_ID,
    stop_ids=STOP_IDS,
    block_width=4,
)
