"""What is read out of the published config.json files (families.md of the research: their fields, and what they lack).

No weights: only the family, the network's shape, and how it is decoded.
"""

from __future__ import annotations

import json

import pytest
from tiny_families import write_text_files

from spot_deploy import SpotDeployError
from spot_deploy.export.checkpoint import open_checkpoint

QWEN = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SDAR_8B = QWEN | {
    "architectures": ["SDARForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"},
    "model_type": "sdar",
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "fuse_cross_entropy": True,
}
QWEN_EOS = {"eos_token_id": [151645, 151643], "pad_token_id": 151643}
LLADA2 = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "vocab_size": 157184,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "first_k_dense_replace": 1,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "num_shared_experts": 1,
    "moe_intermediate_size": 512,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "norm_topk_prob": True,
    "router_dtype": "fp32",
    "partial_rotary_factor": 0.5,
    "rope_theta": 600000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "pad_token_id": 156892,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "use_sliding_window": False,
}
LLADA = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "activation_type": "silu",
    "block_type": "llama",
    "d_model": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 32,
    "mlp_hidden_size": 12288,
    "layer_norm_type": "rms",
    "rms_norm_eps": 1e-5,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "include_bias": False,
    "include_qkv_bias": False,
    "attention_layer_norm": False,
    "weight_tying": False,
    "vocab_size": 126464,
    "embedding_size": 126464,
    "max_sequence_length": 4096,
    "mask_token_id": 126336,
    "eos_token_id": 126081,
    "pad_token_id": 126081,
    "multi_query_attention": None,
    "alibi": False,
    "input_emb_norm": False,
    "scale_logits": False,
}
QWEN_7B = QWEN | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
DREAM = QWEN_7B | {
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "mask_token_id": 151666,
    "pad_token_id": 151643,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "max_position_embeddings": 131072,
}
FAST = QWEN_7B | {
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "model_type": "Fast_dLLM_Qwen",
    "bd_size": 32,
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
STABLE = {
    "architectures": ["LlamaForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_seed_diffcoder.SeedDiffcoderForCausalLM"},
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000,
    "rope_scaling": None,
    "vocab_size": 155136,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
SDAR_MOE = SDAR_8B | {
    "architectures": ["SDARMoeForCausalLM"],
    "model_type": "sdar_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Folder, config, generation_config; family, width, mask, stops, parameters in millions (of the published sizes).
PUBLISHED = {
    "sdar-8b": ("SDAR-8B-Chat", SDAR_8B, QWEN_EOS, ("sdar", 4, 151669, (151645, 151643)), 8191),
    "sdar-b32": ("SDAR-8B-Chat-b32", SDAR_8B, QWEN_EOS, ("sdar", 32, 151669, (151645, 151643)), 8191),
    "trado": ("TraDo-8B-Instruct", SDAR_8B, None, ("sdar", 4, 151669, (151643,)), 8191),
    "sdar-moe": ("SDAR-30B-A3B-Chat-b16", SDAR_MOE, QWEN_EOS, ("sdar-moe", 16, 151669, (151645, 151643)), 30532),
    "llada2": ("LLaDA2.0-mini", LLADA2, None, ("llada2", 32, 156895, (156892,)), 16256),
    "llada": ("LLaDA-8B-Instruct", LLADA, None, ("llada", 32, 126336, (126081,)), 8016),
    "dream": ("Dream-v0-Instruct-7B", DREAM, None, ("dream", 32, 151666, (151643,)), 7616),
    "fast-dllm": ("Fast_dLLM_v2_7B", FAST, None, ("fast-dllm-v2", 32, 151665, (151645,)), 7616),
    "stable": ("Stable-DiffCoder-8B-Instruct", STABLE, None, ("stable-diffcoder", 4, 5, (2,)), 8251),
}


def write(folder, config, generation=None):
    folder.mkdir(parents=True)
    write_text_files(folder)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(("name", "config", "generation", "wanted", "millions"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_configs_are_read(name, config, generation, wanted, millions, tmp_path):
    from spot_deploy.export.decoder import Decoder

    found = open_checkpoint(write(tmp_path / name, config, generation))
    decoding = found.decoding
    assert (found.family.name, decoding.block_width, decoding.mask_id, decoding.stop_ids) == wanted
    parameters = 0
    for _, shape in Decoder.shapes(found.spec):
        count = 1
        for size in shape:
            count *= size
        parameters += count
    assert parameters / 1e6 == pytest.approx(millions, abs=1)
    names = [n for source in found.family.sources(found.spec).values() for n in source.names]
    assert len(names) > 9 * found.spec.layers
    assert found.family.native  # its class exists for every family; tests of tiny checkpoints run it


def test_a_name_in_the_hubs_cache_and_behind_a_link(tmp_path):
    cached = write(tmp_path / "models--JetLM--SDAR-8B-Chat-b16" / "snapshots" / ("0" * 40), SDAR_8B)
    assert open_checkpoint(cached).decoding.block_width == 16
    assert open_checkpoint(cached).name == "SDAR-8B-Chat-b16"
    plain = write(tmp_path / "abc", SDAR_8B)
    link = tmp_path / "SDAR-8B-b32-fp16"
    link.symlink_to(plain)
    assert open_checkpoint(link).decoding.block_width == 32
    later = write(tmp_path / "models--inclusionAI--LLaDA2.1-mini" / "snapshots" / ("1" * 40), LLADA2)
    with pytest.raises(SpotDeployError, match="cannot decode"):
        open_checkpoint(later)


def test_nothing_tells_the_stop_ids(tmp_path):
    config = STABLE | {"eos_token_id": None, "architectures": ["A2DLlamaLMHeadModel"], "auto_map": None}
    folder = write(tmp_path / "llama-bd3lm", config | {"mask_token_id": 299}, {"eos_token_id": None})
    with pytest.raises(SpotDeployError) as caught:
        open_checkpoint(folder, block_width=8)
    assert "--stop-ids" in caught.value.fix
    assert "eos_token_id" in str(caught.value.seen)
    assert open_checkpoint(folder, block_width=8, stop_ids=(2,)).decoding.stop_ids == (2,)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (SDAR_8B | {"head_dim": None}, "head_dim is null"),
        (DREAM | {"num_attention_heads": None}, "num_attention_heads is null"),
        (SDAR_8B | {"hidden_size": "4096"}, "hidden_size is '4096'"),
        ({k: v for k, v in LLADA.items() if k != "d_model"}, "d_model is missing"),
        (LLADA2 | {"_moe_implementation": "fused"}, "_moe_implementation"),
        (LLADA | {"input_emb_norm": True}, "input_emb_norm"),
    ],
    ids=["null", "null-divisor", "text", "missing", "fused-experts", "embedding-norm"],
)
def test_errors_name_the_field(config, field, tmp_path):
    with pytest.raises(SpotDeployError) as caught:
        open_checkpoint(write(tmp_path / "checkpoint", config))
    assert field in str(caught.value.seen)


def test_rotary_share_of_either_spelling(tmp_path):
    moved = {k: v for k, v in LLADA2.items() if k not in ("rope_theta", "partial_rotary_factor", "rope_scaling")}
    moved |= {"rope_parameters": {"rope_type": "default", "rope_theta": 600000, "partial_rotary_factor": 0.5}}
    silent = {k: v for k, v in LLADA2.items() if k != "partial_rotary_factor"}
    for number, config in enumerate((LLADA2, moved, silent)):
        assert open_checkpoint(write(tmp_path / str(number), config)).spec.rotated == 64


def test_a_tokenizer_of_vocabulary_and_merges(tmp_path):
    """Dream ships no tokenizer.json."""
    from tokenizers import Tokenizer

    folder = write(tmp_path / "Dream-tiny", DREAM)
    model = Tokenizer.from_file(str(folder / "tokenizer.json")).model
    model.save(str(folder))
    (folder / "tokenizer.json").unlink()
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.text_folder / "tokenizer.json").is_file()
    assert checkpoint.text_folder != folder
    (folder / "merges.txt").unlink()
    with pytest.raises(SpotDeployError, match="no tokenizer"):
        open_checkpoint(folder)
