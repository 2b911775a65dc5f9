"""Fast-dLLM v2: Qwen2 with block-causal attention, whose row p - 1 predicts position p inside a block.

The first token of a block comes from the pass that stores the block before (NVlabs/Fast-dLLM v2, batch_sample).
"""

from __future__ import annotations

from spot_deploy.export.families.dream import native_qwen2, qwen2_spec
from spot_deploy.export.families.family import Family, sources

FAST_DLLM = Family(
    name="fast-dllm-v2",
    architectures=("Fast_dLLM_QwenForCausalLM",),
    model_types=("Fast_dLLM_Qwen",),
    spec=qwen2_spec,
    sources=sources,
    native=native_qwen2,
    mask_id=151665,
    stop_ids=(151645,),
    block_width=32,
    logit_shift=1,
    given_start=True,
    width_keys=("bd_size",),
)
