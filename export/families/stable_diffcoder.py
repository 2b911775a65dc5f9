"""Stable-DiffCoder-8B: Llama with block-causal attention (ByteDance-Seed/Stable-DiffCoder, modeling file: mask id 5,
blocks of 4, no shift, confidence before the temperature). Its model_type is plain `llama`, and one revision's
architecture plain Llama as well, so that only the class in `auto_map` tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spot_deploy.export.decoder import DecoderSpec
from spot_deploy.export.families.family import Config, Family, hugging_face_spec, native_config, require, sources

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def llama_spec(config: Config) -> DecoderSpec:
    require(config, {"attention_bias": False, "mlp_bias": False})
    return hugging_face_spec(config, qk_norm=False)


def native_llama(config: Config, layers: int) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**native_config(config, layers)))


STABLE_DIFFCODER = Family(
    name="stable-diffcoder",
    architectures=("StableDiffcoderForCausalLM", "SeedDiffcoderForCausalLM"),
    model_types=(),
    spec=llama_spec,
    sources=sources,
    native=native_llama,
    mask_id=5,
    stop_ids=(2,),
    block_width=4,
    confidence="raw",
)
