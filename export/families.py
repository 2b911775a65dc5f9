"""Checkpoint families: from a published config and tensor names to the one decoder.

Facts and sources: SDAR is Qwen3 under another class name (JetAstra/SDAR, training/model); LLaDA is Llama with OLMo's
names (ML-GSAI/LLaDA).
"""

from __future__ import annotations

from spot_deploy.export.decoder import DecoderSpec


def qwen3_tensor_names(spec: DecoderSpec) -> dict[str, str]:
    """Our parameter names to those of Qwen3 and SDAR checkpoints."""
    names = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not spec.tied_head:
        names["head.weight"] = "lm_head.weight"
    parts = {
        "input_norm": "input_layernorm",
        "post_norm": "post_attention_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    return names | _layer_names(spec, "model.layers", parts)


def llada_tensor_names(spec: DecoderSpec) -> dict[str, str]:
    """Our parameter names to those of LLaDA checkpoints."""
    names = {
        "embed.weight": "model.transformer.wte.weight",
        "norm.weight": "model.transformer.ln_f.weight",
    }
    if not spec.tied_head:
        names["head.weight"] = "model.transformer.ff_out.weight"
    parts = {
        "input_norm": "attn_norm",
        "post_norm": "ff_norm",
        "q": "q_proj",
        "k": "k_proj",
        "v": "v_proj",
        "o": "attn_out",
        "gate": "ff_proj",
        "up": "up_proj",
        "down": "ff_out",
    }
    return names | _layer_names(spec, "model.transformer.blocks", parts)


def _layer_names(spec: DecoderSpec, prefix: str, parts: dict[str, str]) -> dict[str, str]:
    return {
        f"layers.{i}.{own}.weight": f"{prefix}.{i}.{theirs}.weight"
        for i in range(spec.layers)
        for own, theirs in parts.items()
        if spec.qk_norm or not own.endswith(("q_norm", "k_norm"))
    }
