"""Measures an export: peak memory, time and disk, on synthetic checkpoints of published shapes.

The weights are random, bfloat16, in shards, under the published names. `--layers` cuts the depth where the disk is too
small for the checkpoint and the bundle (twice the weights).

    python -P scripts/benchmark_export.py sdar-8b --work . -o export-sdar-8b.json
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from spot_deploy.engines import backends
from spot_deploy.engines.files import write_json
from spot_deploy.export.families import find_family
from spot_deploy.export.families.family import published_shapes
from spot_deploy.export.weights import stream_weights

DEMO = Path(__file__).resolve().parents[1] / "demo"
SHARD = 4 << 30
COMMON = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "eos_token_id": 2044,
    "bos_token_id": 2044,
    "mask_token_id": 2047,  # of the demo tokenizer, which stands in for the published one
    "rms_norm_eps": 1e-6,
}
SHAPES: dict[str, dict[str, Any]] = {
    "sdar-8b": COMMON
    | {
        "architectures": ["SDARForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1000000,
        "block_size": 32,
    },
    "llada2-mini": COMMON
    | {
        "architectures": ["LLaDA2MoeModelLM"],
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
        "partial_rotary_factor": 0.5,
        "rope_theta": 600000,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_bias": False,
    },
}
SHAPES["tiny"] = SHAPES["llada2-mini"] | {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
}


def write_checkpoint(folder: Path, config: dict[str, Any]) -> int:
    """A sharded checkpoint; returns its bytes."""
    family = find_family(config, folder.name)
    spec = family.spec(config)
    published = published_shapes(spec, family.sources(spec))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, dims in published.items():
        size += 2 * math.prod(dims)
        if size > SHARD and shards[-1]:
            shards.append({})
            size = 2 * math.prod(dims)
        shards[-1][name] = dims
    generator = torch.Generator().manual_seed(0)
    weight_map = {}
    for number, part in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"

        def tensor(name: str, part: dict[str, tuple[int, ...]] = part) -> torch.Tensor:
            dims = part[name]
            if len(dims) == 1:
                return torch.ones(dims, dtype=torch.bfloat16)
            # A few random rows over and over: as good for this, and much faster to make.
            few = torch.randn(min(dims[0], 256), *dims[1:], generator=generator, dtype=torch.float32) * 0.02
            return few.to(torch.bfloat16).repeat(-(-dims[0] // len(few)), 1)[: dims[0]]

        stream_weights(part, dict.fromkeys(part, torch.bfloat16), tensor, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    write_json(folder / "config.json", config)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(DEMO / "target" / name, folder / name)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def watch(command: list[str]) -> dict[str, Any]:
    """Run a command; its peak memory (all that is resident, and what of it is no file), seconds, and exit code."""
    began, peak, anonymous = time.perf_counter(), 0, 0
    process = subprocess.Popen(command)
    while process.poll() is None:
        try:
            text = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
        except OSError:
            break
        figures = {line.split(":")[0]: line.split()[1] for line in text.splitlines() if line.endswith("kB")}
        peak = max(peak, 1024 * int(figures.get("VmHWM", 0)))
        anonymous = max(anonymous, 1024 * int(figures.get("RssAnon", 0)))
        time.sleep(0.1)
    return {
        "command": " ".join(command[3:]),
        "exit_code": process.wait(),
        "seconds": time.perf_counter() - began,
        "peak_resident_bytes": peak,
        "peak_anonymous_bytes": anonymous,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="depth in place of the published one")
    parser.add_argument("--precisions", default="bf16")
    parser.add_argument("--parity", default="layers")
    parser.add_argument("--work", type=Path, help="where checkpoint and bundle go for the while")
    parser.add_argument("-o", "--output", type=Path, required=True, help="results file (JSON)")
    args = parser.parse_args()
    config = SHAPES[args.shape] | ({"num_hidden_layers": args.layers} if args.layers else {})
    if args.work:
        args.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.work, prefix="benchmark-") as name:
        checkpoint, bundle = Path(name) / "checkpoint", Path(name) / "out.spot"
        checkpoint.mkdir()
        size = write_checkpoint(checkpoint, config)
        command = [sys.executable, "-P", "-m", "spot_deploy", "export", str(checkpoint), "-o", str(bundle)]
        result = watch([*command, "--parity", args.parity, "--precisions", args.precisions])
        result["command"] = result["command"].replace(name, "WORK")
        disk = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    document = {
        "format": "spot-deploy-export-benchmark",
        "schema_version": 1,
        "shape": args.shape,
        "layers": config["num_hidden_layers"],
        "checkpoint_bytes": size,
        "bundle_bytes": disk,
        **result,
        "processor": backends.processor(),
        "system": f"{platform.system()} {platform.release()}",
    }
    write_json(args.output, document)
    print(json.dumps(document, indent=1))
    sys.exit(result["exit_code"])


if __name__ == "__main__":
    main()
