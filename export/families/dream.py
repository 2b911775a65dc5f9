"""Dream-7B, Dream-Coder, DiffuCoder: Qwen2 with full attention, whose row p - 1 predicts position p (DreamLM/Dream).

Fast-dLLM v2 is Qwen2 with the same shift, but block-causal, and the first token of a block comes from the pass that
stores the block before (NVlabs/Fast-dLLM v2, batch_sample).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spot_deploy.export.decoder import DecoderSpec
from spot_deploy.export.families.family import Config, Family, hugging_face_spec, native_config, sources

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _spec(config: Config) -> DecoderSpec:
    return hugging_face_spec(config, qk_norm=False, qkv_bias=True)


def _native(config: Config, layers: int) -> PreTrainedModel:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**native_config(config, layers)))


DREAM = Family(
    name="dream",
    architectures=("DreamModel",),
    model_types=("Dream",),
    spec=_spec,
    sources=sources,
    native=_native,
    mask_id=151666,
    block_width=32,
    attention="full",
    logit_shift=1,
)
FAST_DLLM = Family(
    name="fast-dllm-v2",
    architectures=("Fast_dLLM_QwenForCausalLM",),
    model_types=("Fast_dLLM_Qwen",),
    spec=_spec,
    sources=sources,
    native=_native,
    mask_id=151665,
    block_width=32,
    logit_shift=1,
    given_start=True,
    width_keys=("bd_size",),
)
