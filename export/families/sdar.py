"""SDAR and TraDo: Qwen3 under another class name (JetAstra/SDAR, training/model), dense and as mixtures of experts.

The 1.7B to 8B and -b4 to -b64 checkpoints say nothing of mask and block width: id 151669 and a width of 4 unless the
name tells. SDAR-30B-A3B is Qwen3-MoE (InternLM/lmdeploy, sdar_moe.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spot_deploy.export.decoder import DecoderSpec, MoeSpec
from spot_deploy.export.families.family import Config, Family, hugging_face_spec, native_config, require, sources

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MASK_ID = 151669


def qwen3_spec(config: Config) -> DecoderSpec:
    require(config, {"attention_bias": False})
    return hugging_face_spec(config, qk_norm=True)


def native_qwen3(config: Config, layers: int) -> PreTrainedModel:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**native_config(config, layers)))


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


SDAR = Family(
    name="sdar",
    architectures=("SDARForCausalLM",),
    model_types=("sdar",),
    spec=qwen3_spec,
    sources=sources,
    native=native_qwen3,
    mask_id=MASK_ID,
    block_width=4,
)
SDAR_MOE = Family(
    name="sdar-moe",
    architectures=("SDARMoeForCausalLM",),
    model_types=("sdar_moe",),
    spec=_moe_spec,
    sources=sources,
    native=native_qwen3_moe,
    mask_id=MASK_ID,
    block_width=4,
)
