"""Tiny-A2D: autoregressive models turned into diffusion models (ZHZisZZ/dllm, pipelines/a2d), here those on Qwen3.

Whether attention is block-causal (bd3lm) or full (mdlm) was the trainer's choice and stands in the name alone, as does
nothing of the block width; the mask is a token that was added to the tokenizer.
"""

from __future__ import annotations

from spot_deploy.export.families.family import Config, Family, sources
from spot_deploy.export.families.sdar import native_qwen3, qwen3_spec


def _not_named(wanted: str, other: str) -> str:
    return f"an A2D config does not say how the network attends: the folder's name must hold {wanted} or {other}"


def _refused(config: Config, name: str) -> str | None:
    return None if "bd3lm" in name or "mdlm" in name else _not_named("bd3lm (block-causal)", "mdlm (full)")


A2D_BLOCK = Family(
    name="a2d-bd3lm",
    architectures=("A2DQwen3LMHeadModel",),
    model_types=("a2d-qwen3",),
    spec=qwen3_spec,
    sources=sources,
    native=native_qwen3,
    mask_id=None,
    block_width=None,
    confidence="raw",
    refused=_refused,
)
A2D_FULL = Family(
    name="a2d-mdlm",
    architectures=("A2DQwen3LMHeadModel",),
    model_types=("a2d-qwen3",),
    spec=qwen3_spec,
    sources=sources,
    native=native_qwen3,
    mask_id=None,
    block_width=32,
    confidence="raw",
    attention="full",
)
