"""LLaDA-8B and LLaDA-1.5: Llama with OLMo's names, full attention, confidence before the temperature.

Facts: ML-GSAI/LLaDA, generate.py and the published config and modeling file. LLaDA-MoE is in `llada_moe`: its
model_type is the same in some repositories, its architecture is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spot_deploy.export.decoder import DecoderSpec
from spot_deploy.export.families.family import Config, Family, Source, native_config, require, sources

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PARTS = {
    "input_norm.weight": "attn_norm.weight",
    "post_norm.weight": "ff_norm.weight",
    "q.weight": "q_proj.weight",
    "k.weight": "k_proj.weight",
    "v.weight": "v_proj.weight",
    "o.weight": "attn_out.weight",
    "gate.weight": "ff_proj.weight",
    "up.weight": "up_proj.weight",
    "down.weight": "ff_out.weight",
}
ENDS = {
    "embed.weight": "model.transformer.wte.weight",
    "norm.weight": "model.transformer.ln_f.weight",
    "head.weight": "model.transformer.ff_out.weight",
}


def _spec(config: Config) -> DecoderSpec:
    require(
        config,
        {
            "activation_type": "silu",
            "attention_layer_norm": False,
            "block_type": "llama",
            "include_bias": False,
            "include_qkv_bias": False,
            "layer_norm_type": "rms",
            "rope": True,
            "scale_logits": False,
            "alibi": False,
            "input_emb_norm": False,
            "multi_query_attention": False,
        },
    )
    heads = config["n_heads"]
    return DecoderSpec(
        vocab=config.get("embedding_size") or config["vocab_size"],
        hidden=config["d_model"],
        layers=config["n_layers"],
        heads=heads,
        kv_heads=config.get("n_kv_heads") or heads,
        head_dim=config["d_model"] // heads,
        intermediate=config["mlp_hidden_size"],
        rope_theta=float(config["rope_theta"]),
        norm_eps=float(config.get("rms_norm_eps") or 1e-5),
        qk_norm=False,
        tied_head=bool(config["weight_tying"]),
    )


def llada_sources(spec: DecoderSpec) -> dict[str, Source]:
    return sources(spec, parts=PARTS, ends=ENDS, layer="model.transformer.blocks")


def _native(config: Config, layers: int) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": config.get("embedding_size") or config["vocab_size"],
        "hidden_size": config["d_model"],
        "intermediate_size": config["mlp_hidden_size"],
        "num_attention_heads": config["n_heads"],
        "num_key_value_heads": config.get("n_kv_heads") or config["n_heads"],
        "rms_norm_eps": config.get("rms_norm_eps", 1e-5),
        "max_position_embeddings": config["max_sequence_length"],
        "tie_word_embeddings": config["weight_tying"],
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]},
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    return LlamaForCausalLM(LlamaConfig(**native_config(settings, layers)))


LLADA = Family(
    name="llada",
    architectures=("LLaDAModelLM",),
    model_types=("llada",),
    spec=_spec,
    sources=llada_sources,
    native=_native,
    mask_id=126336,
    stop_ids=(126081,),
    block_width=32,
    confidence="raw",
    attention="full",
    position_keys=("max_sequence_length",),
)
