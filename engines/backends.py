"""The backends by name: who has a module, which extra brings it, what can be said before importing it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from spot_deploy.engines.contracts import GraphSignature, OrderSession, TargetSession
from spot_deploy.engines.errors import usage_error

BACKENDS = ("onnxruntime",)


def require(backend: str) -> None:
    """Check that a backend exists and can be imported here.

    Raises:
        SpotDeployError: unknown name (exit 2), package missing or clashing (exit 4; the error names the extra).
    """
    if backend not in BACKENDS:
        raise usage_error(
            "backend-unknown",
            f"there is no backend {backend!r}",
            wanted=" or ".join(BACKENDS),
            fix=f"choose --backend {BACKENDS[0]}",
        )
    from spot_deploy.engines import ort

    ort.require()


def versions(backend: str) -> dict[str, str]:
    """Package versions and the processor, which together decide an engine's last bits."""
    require(backend)
    from spot_deploy.engines import ort

    return ort.versions() | {"processor": processor()}


def providers(backend: str) -> list[str]:
    """What executes inside the backend."""
    require(backend)
    from spot_deploy.engines import ort

    return list(ort.PROVIDERS)


def open_target(backend: str, path: Path, signature: GraphSignature, threads: int) -> TargetSession:
    """Open a target graph.

    Raises:
        SpotDeployError: the backend is missing, refuses the graph, or reports another signature.
    """
    require(backend)
    from spot_deploy.engines import ort

    return ort.OrtTarget(path, signature, threads)


def open_order_model(backend: str, path: Path, signature: GraphSignature, threads: int) -> OrderSession:
    """Open an order model graph; errors as `open_target`."""
    require(backend)
    from spot_deploy.engines import ort

    return ort.OrtOrderModel(path, signature, threads)


def default_threads() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def processor() -> str:
    """The processor's model name; kernels are chosen by it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return f"{platform.machine()} {line.split(':', 1)[1].strip()}"
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()}".strip()
