"""SDAR and TraDo: Qwen3 under another class name (JetAstra/SDAR, training/model).

The 1.7B to 8B and -b4 to -b64 checkpoints say nothing of mask and block width: id 151669 and a width of 4 unless the
name tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spot_deploy.export.decoder import DecoderSpec
from spot_deploy.export.families.family import Config, Family, hugging_face_spec, native_config, require, sources

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MASK_ID = 151669
STOP_IDS = (151645, 151643)


def qwen3_spec(config: Config) -> DecoderSpec:
    require(config, {"attention_bias": False})
    return hugging_face_spec(config, qk_norm=True)


def native_qwen3(config: Config, layers: int) -> PreTrainedModel:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**native_config(config, layers)))


SDAR = Family(
    name="sdar",
    architectures=("SDARForCausalLM",),
    model_types=("sdar",),
    spec=qwen3_spec,
    sources=sources,
    native=native_qwen3,
    mask_id=MASK_ID,
    stop_ids=STOP_IDS,
    block_width=4,
)
