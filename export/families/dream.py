"""Dream-7B, Dream-Coder, DiffuCoder: Qwen2 with full attention, whose row p - 1 predicts position p (DreamLM/Dream)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spot_deploy.export.decoder import DecoderSpec
from spot_deploy.export.families.family import Config, Family, hugging_face_spec, native_config, sources

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def qwen2_spec(config: Config) -> DecoderSpec:
    return hugging_face_spec(config, qk_norm=False, qkv_bias=True)


def native_qwen2(config: Config, layers: int) -> PreTrainedModel:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**native_config(config, layers)))


DREAM = Family(
    name="dream",
    architectures=("DreamModel",),
    model_types=("Dream",),
    spec=qwen2_spec,
    sources=sources,
    native=native_qwen2,
    mask_id=151666,
    stop_ids=(151643,),
    block_width=32,
    attention="full",
    logit_shift=1,
)
