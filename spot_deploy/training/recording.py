"""`record`: decode prompts draft-free and keep the trajectories."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.engines.files import atomic_path, read_json, write_json
from spot_deploy.runtime.api import Runtime
from spot_deploy.training.prompts import Prompt
from spot_deploy.training.records import FORMAT, META, Recorder

SHARD = 16  # prompts


def record(
    runtime: Runtime,
    prompts: Sequence[Prompt],
    folder: Path,
    *,
    chat: bool,
    temperatures: Sequence[float],
    max_new_tokens: int,
    seed: int,
    progress: Callable[[int, str], None] = lambda done, note: None,
) -> int:
    """Record trajectories; returns the number of passes recorded now.

    Every prompt is decoded once, at the temperatures in turn, with seed + its number.

    Raises:
        SpotDeployError: the folder holds records made with other settings.
    """
    from safetensors.numpy import save_file

    if folder.exists() and not folder.is_dir():
        raise SpotDeployError("records-output", f"{folder} is a file", wanted="a folder", fix="choose another path")
    digest = hashlib.sha256("\n".join(p.text for p in prompts).encode()).hexdigest()
    meta = {
        "format": FORMAT,
        "bundle_id": runtime.bundle_id,
        "block_width": runtime.decoding.block_width,
        "prompts_sha256": digest,
        "chat": chat,
        "temperatures": list(temperatures),
        "max_new_tokens": max_new_tokens,
        "seed": seed,
    }
    if (folder / META).exists():
        seen = read_json(folder / META, code="records", fix="choose another folder")
        if seen != meta:
            raise SpotDeployError(
                "records-other",
                f"{folder} holds records made with other settings",
                seen=str(seen),
                wanted=str(meta),
                fix="choose another folder, or delete this one",
            )
    passes = 0
    for first in range(0, len(prompts), SHARD):
        path = folder / f"shard-{first // SHARD:05d}.safetensors"
        if not path.exists():
            recorder = Recorder(runtime.decoding.block_width)
            for number, prompt in enumerate(prompts[first : first + SHARD], first):
                recorder.temperature, recorder.seed = temperatures[number % len(temperatures)], seed + number
                result = runtime.generate(
                    [{"role": "user", "content": prompt.text}] if chat else prompt.text,
                    budget=0,
                    temperature=recorder.temperature,
                    seed=recorder.seed,
                    max_new_tokens=max_new_tokens,
                    observe=recorder,
                )
                passes += result.nfe
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / META, meta)
            with atomic_path(path) as temporary:
                save_file(recorder.tensors(), temporary)
        progress(min(first + SHARD, len(prompts)), f"{passes} passes")
    return passes
