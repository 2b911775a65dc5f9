"""The backends by name: which module owns each, and what can be said of it before opening a graph."""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
from pathlib import Path
from typing import Any

from spot_deploy.engines.contracts import GraphSignature, OrderSession, TargetSession
from spot_deploy.engines.errors import ENVIRONMENT, SpotDeployError, usage_error

# Module of this package, or an object in it.
_MODULES = {"onnxruntime": "ort", "openvino": "ov", "tensorrt-rtx": "trt:RTX", "tensorrt": "trt:FULL"}
BACKENDS = tuple(_MODULES)
PRECISIONS = ("f32", "bf16", "f16")


def _module(backend: str) -> Any:
    """What owns a backend, once it is known that the backend is installed."""
    if backend not in BACKENDS:
        raise usage_error(
            "backend-unknown",
            f"there is no backend {backend!r}",
            wanted=" or ".join(BACKENDS),
            fix=f"choose --backend {BACKENDS[0]}",
        )
    name, _, attribute = _MODULES[backend].partition(":")
    module: Any = importlib.import_module(f"spot_deploy.engines.{name}")
    owner = getattr(module, attribute) if attribute else module
    owner.require()
    return owner


def require(backend: str) -> None:
    """Check that a backend exists and can be imported here.

    Raises:
        SpotDeployError: unknown name (exit 2), package missing or clashing (exit 4; the error names the extra).
    """
    _module(backend)


def versions(backend: str) -> dict[str, str]:
    """Package versions and the processor, which together decide an engine's last bits."""
    return dict(_module(backend).versions()) | {"processor": processor()}


def providers(backend: str) -> list[str]:
    """What executes inside the backend."""
    return list(_module(backend).providers())


def default_layout(backend: str) -> str:
    """The attention layout that a backend takes unless told otherwise."""
    return str(_module(backend).LAYOUT)


def choose_precision(backend: str, wanted: str | None) -> str:
    """The precision to compute in: what is wanted, else the backend's default on this processor.

    Raises:
        SpotDeployError: this processor cannot (exit code 4).
    """
    possible: tuple[str, ...] = _module(backend).precisions()
    if wanted is not None and wanted not in possible:
        raise SpotDeployError(
            "precision",
            f"{backend} does not compute in {wanted} on this processor",
            seen=processor(),
            wanted=" or ".join(possible),
            fix=f"--precision {possible[0]}",
            exit_code=ENVIRONMENT,
        )
    return wanted or possible[0]


def open_target(backend: str, path: Path, signature: GraphSignature, *, threads: int, precision: str) -> TargetSession:
    """Open a target graph.

    Raises:
        SpotDeployError: the backend is missing, refuses the graph, or reports another signature or precision.
    """
    session: TargetSession = _module(backend).Target(path, signature, threads, precision)
    return session


def open_order_model(
    backend: str, path: Path, signature: GraphSignature, *, threads: int, precision: str
) -> OrderSession:
    """Open an order model graph; errors as `open_target`."""
    session: OrderSession = _module(backend).OrderModel(path, signature, threads, precision)
    return session


def default_threads() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def processor() -> str:
    """Model name and a digest of what kernels are chosen by: family, model, stepping and instruction sets."""
    wanted = ("model name", "cpu family", "model", "stepping", "flags", "CPU part", "Features")
    facts: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                facts.setdefault(name.strip(), value.strip())
    except OSError:
        facts["model name"] = platform.processor()
    digest = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:8]
    return f"{platform.machine()} {facts.get('model name', '')} {digest}"
