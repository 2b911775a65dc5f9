"""The backends by name: which module owns each, and what can be said of it before opening a graph."""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
from pathlib import Path
from typing import Any

from spot_deploy.engines import cuda
from spot_deploy.engines.contracts import Compiled, GraphSignature, OrderSession, TargetSession
from spot_deploy.engines.errors import ENVIRONMENT, SpotDeployError, usage_error
from spot_deploy.engines.inspector import Layer
from spot_deploy.engines.profiles import Sizes

# Module of this package, or an object in it.
_MODULES = {"onnxruntime": "ort", "openvino": "ov", "tensorrt-rtx": "trt:RTX", "tensorrt": "trt:FULL"}
BACKENDS = tuple(_MODULES)
CPU_BACKENDS = ("onnxruntime", "openvino")  # those that need no GPU
# How an engine may be portable: to later versions of TensorRT, to all GPUs of its compute capability, from sm80 on.
PORTABLE = ("version", "same-sm", "ampere-plus")


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


def versions(backend: str, provider: str = "cpu") -> dict[str, str]:
    """What decides an engine's last bits: package versions, and the processor or GPU (if there is one)."""
    found = dict(_module(backend).versions())
    if backend not in CPU_BACKENDS:
        return found
    return found | {"processor": processor()} | ({} if provider == "cpu" else cuda.versions())


def providers(backend: str) -> tuple[str, ...]:
    """What may execute inside a backend, the default first."""
    return tuple(_module(backend).providers())


def precisions(backend: str) -> tuple[str, ...]:
    """What a backend computes in on this machine, the default first."""
    return tuple(_module(backend).precisions())


def builds_without_device(backend: str) -> bool:
    """Whether an engine can be compiled where it cannot run."""
    return backend not in CPU_BACKENDS and bool(_module(backend).ahead_of_time)


def compiles(backend: str) -> bool:
    """Whether a backend compiles engine files; the others open the ONNX file itself."""
    return backend not in CPU_BACKENDS


def compile_engine(backend: str, **options: Any) -> dict[str, Any]:
    """Compile engine files into a folder; arguments, result and errors as `trt.TensorRT.compile`."""
    facts: dict[str, Any] = _module(backend).compile(**options)
    return facts


def choose_provider(backend: str, wanted: str | None) -> str:
    """The part of a backend that executes: what is wanted, else its default.

    Raises:
        SpotDeployError: the backend has no such provider (exit code 2).
    """
    possible = providers(backend)
    if wanted is not None and wanted not in possible:
        raise usage_error(
            "provider-unknown",
            f"{backend} has no provider {wanted!r}",
            wanted=" or ".join(possible),
            fix=f"--provider {possible[0]}",
        )
    return wanted or possible[0]


def choose_targets(backend: str, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Compute capabilities to compile for; CPU backends have none.

    Raises:
        SpotDeployError: the backend cannot compile for one of them (exit code 2).
    """
    if backend not in CPU_BACKENDS:
        chosen: tuple[str, ...] = _module(backend).choose_capabilities(wanted)
        return chosen
    if wanted:
        raise usage_error(
            "targets", f"{backend} compiles for no compute capability", seen=", ".join(wanted), fix="leave --target out"
        )
    return ()


def choose_portability(backend: str, portable: tuple[str, ...], strip: bool) -> None:
    """Check that a backend compiles engines that are portable in these ways (see PORTABLE), or without weights.

    Raises:
        SpotDeployError: it does not (exit code 2).
    """
    if backend not in CPU_BACKENDS:
        _module(backend).choose_portability(portable)
    elif portable or strip:
        raise usage_error(
            "portable",
            f"{backend} opens the bundle's ONNX file itself: there is no engine file to make portable or to strip",
            fix="leave --portable and --strip out",
        )


def base_disk(backend: str) -> int:
    """Bytes that a backend writes whatever the target: compiled code and the order model (seen: up to 28 MB)."""
    return 0 if backend in CPU_BACKENDS else 40 << 20


def base_memory(backend: str) -> int:
    """Bytes that a build takes whatever the target, rounded up from what was measured on a tiny one.

    OpenVINO keeps kernels for every shape that the probe goes through.
    """
    return {"onnxruntime": 400 << 20, "openvino": 1400 << 20}.get(backend, 1000 << 20)


def artefact_bytes_per_weight(backend: str, precision: str) -> float:
    """Size of what a backend writes to disk, per weight; 0 where it opens the ONNX file itself."""
    return 0.0 if backend in CPU_BACKENDS else {"f32": 4.0}.get(precision, 2.0)


def require_device(backend: str, provider: str, targets: tuple[str, ...] = ()) -> None:
    """Check that the device that a provider runs on is there, with its driver and libraries.

    Args:
        targets: compute capabilities that an engine was built for.

    Raises:
        SpotDeployError: it is not (exit code 4; one sentence says what is missing).
    """
    _module(backend).require_device(provider, targets)


def default_layout(backend: str) -> str:
    """The attention layout that a backend takes unless told otherwise."""
    return str(_module(backend).LAYOUT)


def choose_precision(backend: str, wanted: str | None) -> str:
    """The precision to compute in: what is wanted, else the backend's default on this processor.

    Raises:
        SpotDeployError: this processor cannot (exit code 4).
    """
    possible = precisions(backend)
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


def graph_precision(backend: str, precision: str) -> str:
    """Which target graph a backend needs to run in a precision (see contracts.GRAPH_PRECISIONS).

    Raises:
        SpotDeployError: as `require`.
    """
    return str(_module(backend).graph_precision(precision))


def open_target(
    backend: str,
    path: Path,
    signature: GraphSignature,
    *,
    threads: int,
    precision: str,
    provider: str = "cpu",
    compiled: Compiled | None = None,
    sizes: Sizes | None = None,
) -> TargetSession:
    """Open a target graph.

    Args:
        compiled: what to know of the file, where the backend compiles engines.
        sizes: least, best and most of every free axis, where the provider compiles for shapes while it runs.

    Raises:
        SpotDeployError: the backend is missing, refuses the graph, or reports another signature or precision.
    """
    session: TargetSession = _open("Target", backend, path, signature, threads, precision, provider, compiled, sizes)
    return session


def open_order_model(
    backend: str,
    path: Path,
    signature: GraphSignature,
    *,
    threads: int,
    precision: str,
    provider: str = "cpu",
    compiled: Compiled | None = None,
    sizes: Sizes | None = None,
) -> OrderSession:
    """Open an order model graph; arguments and errors as `open_target`."""
    session: OrderSession = _open("OrderModel", backend, path, signature, threads, precision, provider, compiled, sizes)
    return session


def _open(
    kind: str,
    backend: str,
    path: Path,
    signature: GraphSignature,
    threads: int,
    precision: str,
    provider: str,
    compiled: Compiled | None,
    sizes: Sizes | None,
) -> Any:
    opener = getattr(_module(backend), kind)
    if compiled is not None:
        return opener(path, signature, threads, precision, provider, compiled)
    return opener(path, signature, threads, precision, provider, **({} if sizes is None else {"sizes": sizes}))


def engine_layers(backend: str, session: TargetSession | OrderSession) -> list[Layer]:
    """The layers of a compiled engine that is open, as the backend's inspector gives them."""
    layers: list[Layer] = _module(backend).layers(session)
    return layers


def compiled_kernels(backend: str, session: TargetSession | OrderSession) -> memoryview | None:
    """What a backend compiled for this GPU while an engine ran (see contracts.Compiled.kernels); None: nothing."""
    kernels: memoryview | None = _module(backend).compiled_kernels(session)
    return kernels


def default_threads() -> int:
    """Cores that this process may use: those it may run on, and no more than its control group's quota pays for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, cores if quota is None else min(cores, int(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that the control groups of this process allow; None without a limit (or without Linux).

    Version 2 (`cpu.max`) and version 1 (`cpu.cfs_quota_us`); the tightest limit on the way up to the root counts.

    Args:
        root: of the file tree that holds `proc` and `sys`.
    """
    groups = root / "sys/fs/cgroup"
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base = groups
        elif "cpu" in controllers.split(","):
            base = next((b for b in (groups / controllers, groups / "cpu") if b.is_dir()), groups)
        else:
            continue
        inside = Path(path.lstrip("/"))
        # Inside a container the path may be that of the host while the mount shows the container's own group as root.
        if ".." in inside.parts:
            inside = Path()
        for group in (base / part for part in (inside, *inside.parents)):
            quota, _, period = _read(group / "cpu.max").partition(" ")
            if not period:
                quota, period = (_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
            if quota.strip().isdigit() and period.strip().isdigit() and int(quota) and int(period):
                limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _read(path: Path) -> str:
    """A file's text; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


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
