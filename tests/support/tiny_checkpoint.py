"""A tiny SDAR checkpoint written by the native transformers class, with a tokenizer and a chat template."""

from __future__ import annotations

import json

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

WIDTH = 8
TEXT = ["the cat sat on the mat and the dog ran to the big red house", "one two three four five six seven"] * 20
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder, mask):
    """Byte-level BPE of 296 ids and four special tokens, the mask (299) the last; returns the ids of these."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=296, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", mask]
    while tokenizer.get_vocab_size() < 296:
        tokenizer.add_tokens([f"extra{tokenizer.get_vocab_size()}"])
    tokenizer.add_special_tokens(special)
    ids = {t: tokenizer.token_to_id(t) for t in special}
    assert ids[mask] == 299
    tokenizer.save(str(folder / "tokenizer.json"))
    return ids


def write_tiny_checkpoint(folder, *, tied=False, shards=False, norms=True, seed=0, **changes):
    """Random weights, drawn wide so that distributions are peaked. Ids from 300 on are unknown to the tokenizer.

    `norms`: random ones too; else all 1, as in a network that is not trained. `changes`: other sizes, by their name in
    the config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 320,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
    } | changes
    spread = (48 / sizes["hidden_size"]) ** 0.5
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(std=spread * (0.25 if "lm_head" not in name else 0.6))
            elif norms:
                p.uniform_(0.7, 1.3)
    model.save_pretrained(folder, max_shard_size="40KB" if shards else "5GB")
    ids = write_tokenizer(folder, "<|MASK|>")
    config = {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "block_size": WIDTH,
        "mask_token_id": ids["<|MASK|>"],
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|endoftext|>"],
        **sizes,
    }
    generation = {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "bos_token_id": ids["<|endoftext|>"]}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "mask_token": "<|MASK|>",
        "clean_up_tokenization_spaces": False,
    }
    for name, document in {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer_config.json": tokenizer_config,
    }.items():
        (folder / name).write_text(json.dumps(document))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
