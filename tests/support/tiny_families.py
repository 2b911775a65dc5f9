"""Tiny random checkpoints of every family: weights drawn by native transformers classes, renamed here to the published
tensor names (independently of export's own tables), with the published fields of config.json."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file
from tiny_checkpoint import WIDTH, write_tokenizer
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB = 320
MASK, END, TURN = 299, 296, 298
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "eos_token_id": END,
    "bos_token_id": END,
    "mask_token_id": MASK,
}
NATIVE = ("rope_theta", "mask_token_id")  # fields that native configs spell otherwise


def draw(model, seed):
    """Wide random weights, so that distributions are peaked; everything that a class would leave at 0 or 1 as well."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_(std=0.5)
            elif p.dim() == 1:
                p.uniform_(0.7, 1.3)
            else:
                p.normal_(std=0.6 if "lm_head" in name else 0.25)
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.uniform_(-0.3, 0.3)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def split_experts(weights):
    """Stacked experts of the native classes to one tensor each, as they are published."""
    found = {}
    for name, tensor in weights.items():
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                found[f"{name.removesuffix('gate_up_proj')}{e}.gate_proj.weight"] = gate.clone()
                found[f"{name.removesuffix('gate_up_proj')}{e}.up_proj.weight"] = up.clone()
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(tensor):
                found[f"{name.removesuffix('down_proj')}{e}.down_proj.weight"] = down.clone()
        else:
            found[name] = tensor
    return found


def native(config, **more):
    return {k: v for k, v in config.items() if k not in NATIVE} | {"rope_parameters": ROPE} | more


def sdar(seed):
    config = COMMON | {"head_dim": 16, "attention_bias": False, "block_size": WIDTH}
    model = Qwen3ForCausalLM(Qwen3Config(**native(config)))
    return draw(model, seed), config | {"architectures": ["SDARForCausalLM"], "model_type": "sdar"}


def sdar_moe(seed):
    config = COMMON | {
        "head_dim": 16,
        "attention_bias": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
        "block_size": WIDTH,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**native(config)))
    named = {"architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe"}
    return split_experts(draw(model, seed)), config | named


def llada2(seed):
    config = COMMON | {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "partial_rotary_factor": 0.5,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "norm_topk_prob": True,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_bias": False,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "rope_scaling": None,
        "block_size": WIDTH,
    }
    own = ("num_experts", "num_shared_experts", "score_function", "moe_router_enable_expert_bias", "rope_scaling")
    settings = {k: v for k, v in native(config).items() if k not in own} | {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "attention_bias": False,
        "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
    }
    weights = split_experts(draw(Glm4MoeForCausalLM(Glm4MoeConfig(**settings)), seed))
    found = {}
    for name, tensor in weights.items():
        if ".self_attn.q_proj." in name:
            rest = [weights[name.replace("q_proj", x)] for x in ("k_proj", "v_proj")]
            found[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat((tensor, *rest))
        elif ".self_attn.k_proj." in name or ".self_attn.v_proj." in name:
            continue
        else:
            for theirs, published in {
                "embed_tokens": "word_embeddings",
                "self_attn.o_proj": "attention.dense",
                "self_attn.q_norm": "attention.query_layernorm",
                "self_attn.k_norm": "attention.key_layernorm",
                "e_score_correction_bias": "expert_bias",
            }.items():
                name = name.replace(theirs, published)
            found[name] = tensor
    return found, config | {"architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe"}


def llada(seed):
    sizes = {**COMMON, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}
    weights = draw(LlamaForCausalLM(LlamaConfig(**native(sizes))), seed)
    names = {
        "model.embed_tokens": "model.transformer.wte",
        "model.norm": "model.transformer.ln_f",
        "lm_head": "model.transformer.ff_out",
        "model.layers": "model.transformer.blocks",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ff_norm",
        "self_attn.q_proj": "q_proj",
        "self_attn.k_proj": "k_proj",
        "self_attn.v_proj": "v_proj",
        "self_attn.o_proj": "attn_out",
        "mlp.gate_proj": "ff_proj",
        "mlp.up_proj": "up_proj",
        "mlp.down_proj": "ff_out",
    }
    found = {}
    for name, tensor in weights.items():
        for theirs, published in names.items():
            name = name.replace(theirs, published)
        found[name] = tensor
    config = {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "d_model": 48,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 4,
        "mlp_hidden_size": 80,
        "activation_type": "silu",
        "block_type": "llama",
        "layer_norm_type": "rms",
        "rms_norm_eps": 1e-5,
        "rope": True,
        "rope_theta": 10000.0,
        "include_bias": False,
        "include_qkv_bias": False,
        "attention_layer_norm": False,
        "weight_tying": False,
        "vocab_size": VOCAB,
        "embedding_size": VOCAB,
        "max_sequence_length": 256,
        "mask_token_id": MASK,
        "eos_token_id": END,
        "pad_token_id": END,
    }
    return found, config


def llada_moe(seed):
    config = {k: v for k, v in COMMON.items() if k != "intermediate_size"} | {
        "dense_intermediate_size": 80,
        "expert_intermediate_size": 32,
        "shared_expert_intermediate_size": None,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_layer_freq": [0, 1],
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False,
        "norm_topk_prob": None,
        "qk_layernorm": True,
        "partial_rotary_factor": 1,
        "attention_bias": False,
        "clip_qkv": None,
    }
    sizes = native(COMMON) | {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 12,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
    }
    weights = split_experts(draw(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)), seed))
    return weights, config | {"architectures": ["LLaDAMoEModelLM"], "model_type": "llada"}


def dream(seed):
    weights = draw(Qwen2ForCausalLM(Qwen2Config(**native(COMMON))), seed)
    return weights, COMMON | {"architectures": ["DreamModel"], "model_type": "Dream", "use_sliding_window": False}


def fast_dllm(seed):
    weights = draw(Qwen2ForCausalLM(Qwen2Config(**native(COMMON))), seed)
    named = {"architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen", "bd_size": WIDTH}
    return weights, COMMON | named


def stable_diffcoder(seed):
    config = COMMON | {"attention_bias": False, "mlp_bias": False, "head_dim": 12, "block_length": WIDTH}
    weights = draw(LlamaForCausalLM(LlamaConfig(**native(config))), seed)
    return weights, config | {"architectures": ["StableDiffcoderForCausalLM"], "model_type": "llama"}


def a2d(seed):
    config = COMMON | {"head_dim": 16, "attention_bias": False, "tie_word_embeddings": True}
    model = Qwen3ForCausalLM(Qwen3Config(**native(config)))
    weights = {k: v for k, v in draw(model, seed).items() if k != "lm_head.weight"}
    del config["mask_token_id"]  # the tokenizer tells
    return weights, config | {"architectures": ["A2DQwen3LMHeadModel"], "model_type": "a2d-qwen3"}


# Folder name, writer, options of export that the checkpoint leaves open.
FAMILIES = {
    "sdar": ("SDAR-tiny", sdar, {}),
    "sdar-moe": ("SDAR-tiny-A3B", sdar_moe, {}),
    "llada2": ("LLaDA2.0-tiny", llada2, {}),
    "llada": ("LLaDA-tiny", llada, {"block_width": WIDTH}),
    "llada-moe": ("LLaDA-MoE-tiny", llada_moe, {"block_width": WIDTH}),
    "dream": ("Dream-tiny", dream, {"block_width": WIDTH}),
    "fast-dllm-v2": ("Fast_dLLM_v2_tiny", fast_dllm, {}),
    "stable-diffcoder": ("Stable-DiffCoder-tiny", stable_diffcoder, {}),
    "a2d-bd3lm": ("Qwen3-tiny-diffusion-bd3lm-v0.1", a2d, {"block_width": WIDTH}),
    "a2d-mdlm": ("Qwen3-tiny-diffusion-mdlm-v0.1", a2d, {"block_width": WIDTH}),
}


def write_text_files(folder):
    write_tokenizer(folder, "<|mask|>")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "mask_token": "<|mask|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_family(parent, family, *, seed=0, dtype=torch.float32):
    """The checkpoint's folder, and options of export that it needs."""
    name, writer, options = FAMILIES[family]
    folder = parent / name
    folder.mkdir(parents=True)
    weights, config = writer(seed)
    save_file({k: v.to(dtype).contiguous() for k, v in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [TURN, END], "bos_token_id": END}))
    write_text_files(folder)
    return folder, options
