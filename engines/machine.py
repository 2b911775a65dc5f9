"""What this machine has left: memory and disk, and what an engine is estimated to take."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spot_deploy.engines.contracts import TargetShape
from spot_deploy.engines.errors import ENVIRONMENT, SpotDeployError
from spot_deploy.engines.files import safetensors_header
from spot_deploy.engines.profiles import Profile

# Weights in float32 are held once by the engine and once while it is being made.
WEIGHT_COPIES = 2
LOGIT_COPIES = 4  # logits, scattered rest, scaled rest, exponentials


@dataclass(frozen=True)
class Estimate:
    """Bytes that a build is expected to need, and that are there. `None`: the system does not tell."""

    memory: int
    memory_free: int | None
    disk: int
    disk_free: int | None

    def require(self) -> None:
        """Raise (exit code 4) if memory or disk would run out."""
        for name, needed, free in (
            ("memory", self.memory, self.memory_free),
            ("disk", self.disk, self.disk_free),
        ):
            if free is not None and needed > free:
                raise SpotDeployError(
                    f"too-little-{name}",
                    f"this build is expected to need more {name} than is free",
                    seen=f"{free / 1e9:.2f} GB free",
                    wanted=f"about {needed / 1e9:.2f} GB",
                    fix="free some, choose smaller --budgets, or --ignore-limits to try all the same",
                    exit_code=ENVIRONMENT,
                )


def memory_free(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take: what the system has available, and what its cgroup leaves."""
    found = []
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) << 10)
    except (OSError, ValueError):
        pass
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            taken = int((root / used).read_text())
            found.append(int((root / limit).read_text()) - taken + _page_cache((root / used).parent))
        except (OSError, ValueError):
            continue  # no such cgroup version, or "max"
    return max(0, min(found)) if found else None


def peak_memory() -> int:
    """Most bytes that this process has held in memory at once; 0 where the system does not tell."""
    try:  # getrusage would count what the parent held before it started this program
        for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return 0


def _page_cache(group: Path) -> int:
    """Bytes of file contents that the system gives back when a cgroup needs memory; they count as used."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
        return next(
            int(line.split()[1]) for line in lines if line.split()[0] in ("inactive_file", "total_inactive_file")
        )
    except (OSError, ValueError, StopIteration, IndexError):
        return 0


def disk_free(path: Path) -> int | None:
    """Bytes that may be written beside `path`."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def weight_elements(path: Path) -> int:
    """Numbers in a safetensors file, from its header."""
    _, entries = safetensors_header(path)
    return sum(math.prod(entry["shape"]) for entry in entries.values())


def estimate(
    folder: Path,
    weights: Path,
    shape: TargetShape,
    profiles: Sequence[Profile],
    *,
    base_memory: int,
    base_disk: int,
    artefact_bytes_per_weight: float,
) -> Estimate:
    """What making an engine takes.

    Args:
        folder: where it will be written.
        weights: the target's weights.
        base_memory, base_disk: what a build with this backend takes whatever the target.
        artefact_bytes_per_weight: of what is written to disk; 0 for backends that open the ONNX file itself.
    """
    elements = weight_elements(weights)
    rows = max(p.symbols["M"][2] for p in profiles)
    prefix = max(p.symbols["R"][2] * p.symbols["P"][2] for p in profiles)
    cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * prefix * 4
    memory = base_memory + WEIGHT_COPIES * 4 * elements + LOGIT_COPIES * 4 * rows * shape.vocab + 2 * cache
    artefact = base_disk + int(artefact_bytes_per_weight * elements)
    return Estimate(memory + artefact, memory_free(), artefact + (1 << 20), disk_free(folder))
