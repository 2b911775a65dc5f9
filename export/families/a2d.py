"""Tiny-A2D: autoregressive models turned into diffusion models (ZHZisZZ/dllm, pipelines/a2d), on Qwen3, Qwen2 or Llama.

Whether attention is block-causal (bd3lm) or full (mdlm) was the trainer's choice and stands in the name alone, as does
nothing of the block width; the mask is a token that was added to the tokenizer.
"""

from __future__ import annotations

from spot_deploy.export.families.dream import native_qwen2, qwen2_spec
from spot_deploy.export.families.family import Config, Family, sources
from spot_deploy.export.families.sdar import native_qwen3, qwen3_spec
from spot_deploy.export.families.stable_diffcoder import llama_spec, native_llama

_BASES = {
    "Qwen3": (qwen3_spec, native_qwen3),
    "Qwen2": (qwen2_spec, native_qwen2),
    "Llama": (llama_spec, native_llama),
}
_ATTENTION = {"bd3lm": "block-causal", "mdlm": "full"}


def _family(base: str, kind: str) -> Family:
    def refused(config: Config, name: str) -> str | None:
        if sum(other in name for other in _ATTENTION) == 1:
            return None
        return "a folder's name with either bd3lm (block-causal) or mdlm (full): the config does not say how it attends"

    spec, native = _BASES[base]
    return Family(
        name=f"a2d-{kind}-{base.lower()}",
        architectures=(f"A2D{base}LMHeadModel",),
        model_types=(f"a2d-{base.lower()}",),
        spec=spec,
        sources=sources,
        native=native,
        mask_id=None,
        block_width=None if kind == "bd3lm" else 32,
        confidence="raw",
        attention=_ATTENTION[kind],
        fits=lambda name: kind in name or not any(other in name for other in _ATTENTION),
        refused=refused,
    )


A2D = tuple(_family(base, kind) for base in _BASES for kind in _ATTENTION)
