"""Device memory, copies, streams and graphs. The only module that imports cuda-python.

Every call's status is checked. Memory is freed when nothing refers to it any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import re
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spot_deploy.engines.contracts import ITEMSIZE, Array
from spot_deploy.engines.errors import ENVIRONMENT, SpotDeployError

DRIVER = Path("/proc/driver/nvidia/version")
NON_BLOCKING = 1  # cudaStreamNonBlocking


def missing_driver() -> str | None:
    """What lacks for running on a GPU, in one sentence; None where a driver answers that is new enough.

    Checked before any TensorRT runtime object: without a driver some versions end the process.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"this machine has no NVIDIA driver ({error})"
    status = driver.cuInit(0)
    if status:
        return f"the NVIDIA driver finds no usable GPU (cuInit returned {status})"
    with contextlib.suppress(SpotDeployError):  # cuda-python is missing, which whoever needs it says better
        supported, needed = (_call(f"cuda{which}GetVersion") for which in ("Driver", "Runtime"))
        if supported // 1000 < needed // 1000:
            return (
                f"the NVIDIA driver supports CUDA {supported // 1000}, and cuda-bindings is for CUDA {needed // 1000}: "
                f"install a newer driver, or cuda-bindings {supported // 1000}"
            )
    return None


@functools.cache
def _runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except (ImportError, OSError) as error:
        raise SpotDeployError(
            "cuda-missing",
            "cuda-python is not installed",
            seen=str(error),
            fix='pip install "cuda-bindings>=12", which the extras gpu, rtx and tensorrt bring',
            exit_code=ENVIRONMENT,
        ) from error
    return runtime


def _call(name: str, *arguments: Any) -> Any:
    """One function of the CUDA runtime; its result without the status.

    Raises:
        SpotDeployError: out of memory, or another status than success; named as CUDA names it.
    """
    runtime = _runtime()
    status, *results = getattr(runtime, name)(*arguments)
    if int(status) != 0:
        text = f"{name}: {getattr(status, 'name', status)}"
        if "MemoryAllocation" in text:
            raise SpotDeployError(
                "gpu-memory",
                "the GPU has no memory left",
                seen=text,
                fix="use fewer requests at a time, or a smaller --max-positions at export; see what else uses the GPU",
            )
        raise SpotDeployError(
            "cuda", "a call to the GPU failed", seen=text, fix="spot-deploy doctor; report the message"
        )
    return results[0] if len(results) == 1 else tuple(results)


def require_memory(*files: Path, buffers: int = 0) -> None:
    """Check that the GPU has room for what these files hold, and for `buffers` bytes, before anything is loaded.

    What a backend needs as scratch memory comes on top: it tells so only when the engine is open.

    Raises:
        SpotDeployError: it has not (exit code 4).
    """
    weights = sum(path.stat().st_size for path in files)
    needed = weights + buffers
    free, total = _call("cudaMemGetInfo")
    if needed > free:
        raise SpotDeployError(
            "too-little-gpu-memory",
            "the GPU has too little memory left",
            seen=f"{free / 1e9:.2f} GB free of {total / 1e9:.2f} GB",
            wanted=f"{weights / 1e9:.2f} GB for {', '.join(path.name for path in files)}"
            f" and {buffers / 1e9:.2f} GB for one request",
            fix="end what else uses the GPU (nvidia-smi lists it), or take a smaller target or --precision",
            exit_code=ENVIRONMENT,
        )


def _free_with(owner: object, name: str, handle: Any) -> None:
    """Call a function of the CUDA runtime when nothing refers to `owner` any more."""
    weakref.finalize(owner, getattr(_runtime(), name), handle).atexit = False


def capability() -> str:
    """Compute capability of the first GPU, such as `sm89`."""
    kind = _runtime().cudaDeviceAttr
    names = (f"cudaDevAttrComputeCapability{part}" for part in ("Major", "Minor"))
    return "sm" + "".join(str(_call("cudaDeviceGetAttribute", getattr(kind, name), 0)) for name in names)


def versions() -> dict[str, str]:
    """What on the GPU's side decides last bits: its model, and the CUDA version of its driver; empty without one."""
    if missing_driver() is not None:
        return {}
    model = bytes(_call("cudaGetDeviceProperties", 0).name).rstrip(b"\0").decode(errors="replace")
    return {"gpu": f"{model} {capability()}", "driver": _driver_version()}


def _driver_version() -> str:
    """The driver's own version, which decides what is compiled while an engine runs; else its CUDA version."""
    try:
        told = re.search(r"(\d+\.\d+(?:\.\d+)?)", DRIVER.read_text(encoding="utf-8", errors="replace"))
        if told:
            return told[1]
    except OSError:
        pass
    version = int(_call("cudaDriverGetVersion"))
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


class Stream:
    """A queue of work on the GPU."""

    def __init__(self) -> None:
        # Non-blocking: while an ordinary stream is recorded, work on the default stream of any thread fails.
        self.handle: Any = _call("cudaStreamCreateWithFlags", NON_BLOCKING)
        _free_with(self, "cudaStreamDestroy", self.handle)

    def __int__(self) -> int:
        return int(self.handle)

    def wait(self) -> None:
        """Until all work is done."""
        _call("cudaStreamSynchronize", self.handle)

    def record(self, work: Callable[[], None]) -> Graph:
        """What `work` puts into this stream, as a graph; it is not done now.

        Raises:
            SpotDeployError: what `work` raises, or it cannot be recorded; the stream can be used again all the same.
        """
        _call("cudaStreamBeginCapture", self.handle, _runtime().cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
        try:
            work()
        except BaseException:
            status, recorded = _runtime().cudaStreamEndCapture(self.handle)
            if int(status) == 0:
                _call("cudaGraphDestroy", recorded)
            raise
        return Graph(_call("cudaStreamEndCapture", self.handle))


class Graph:
    """Recorded work that one call starts."""

    def __init__(self, recorded: Any) -> None:
        self._executable: Any = _call("cudaGraphInstantiate", recorded, 0)
        _call("cudaGraphDestroy", recorded)
        _free_with(self, "cudaGraphExecDestroy", self._executable)

    def launch(self, stream: Stream) -> None:
        """Start it."""
        _call("cudaGraphLaunch", self._executable, stream.handle)


class DeviceView:
    """A tensor that lies somewhere in device memory.

    Attributes:
        dtype: as in engines.contracts; NumPy has no bfloat16, which is only moved about.
        address: of its first byte.
        owner: keeps it there.
    """

    def __init__(self, dtype: str, shape: Sequence[int], address: int, owner: object):
        self.dtype, self.shape, self.address, self.owner = dtype, tuple(shape), address, owner
        self.bytes = ITEMSIZE[dtype] * math.prod(self.shape)

    def download(self, array: Array, stream: Stream, offset: int = 0) -> None:
        """Copy bytes from `offset` on to a host array; they are there when the stream has waited."""
        assert array.flags.c_contiguous
        assert offset + array.nbytes <= self.bytes
        _copy(array.ctypes.data, self.address + offset, array.nbytes, "DeviceToHost", stream)


class DeviceArray(DeviceView):
    """A piece of device memory of our own; it never moves."""

    def __init__(self, dtype: str, shape: Sequence[int]):
        size = ITEMSIZE[dtype] * math.prod(shape)
        super().__init__(dtype, shape, int(_call("cudaMalloc", max(1, size))), None)
        _free_with(self, "cudaFree", self.address)

    def clear(self, stream: Stream) -> None:
        """Fill with zeros."""
        _call("cudaMemsetAsync", self.address, 0, self.bytes, stream.handle)

    def upload(self, array: Array, stream: Stream) -> None:
        """Copy from the host; the array must not be changed until the stream has waited."""
        assert array.flags.c_contiguous
        assert array.nbytes <= self.bytes
        _copy(self.address, array.ctypes.data, array.nbytes, "HostToDevice", stream)


def copy_first(to: DeviceArray, source: DeviceView, count: int, stream: Stream) -> None:
    """Copy the first `count` bytes on the GPU."""
    assert count <= min(to.bytes, source.bytes)
    _copy(to.address, source.address, count, "DeviceToDevice", stream)


def _copy(to: int, source: int, count: int, kind: str, stream: Stream) -> None:
    kinds = _runtime().cudaMemcpyKind
    _call("cudaMemcpyAsync", to, source, count, getattr(kinds, f"cudaMemcpy{kind}"), stream.handle)


def copy_columns(
    to: DeviceArray, at: int, source: DeviceView, first: int, count: int, stream: Stream, *, rows: int
) -> None:
    """Copy columns [first, first + count) of the first `rows` rows of `source` [..., columns, D] to `at` in `to`."""
    size = ITEMSIZE[to.dtype]
    assert (to.dtype, to.shape[-1]) == (source.dtype, source.shape[-1])
    width = to.shape[-1] * size
    _call(
        "cudaMemcpy2DAsync",
        to.address + at * width,
        to.shape[-2] * width,
        source.address + first * width,
        source.shape[-2] * width,
        count * width,
        rows,
        _runtime().cudaMemcpyKind.cudaMemcpyDeviceToDevice,
        stream.handle,
    )


def as_dtype(array: Array, dtype: str) -> Array:
    """A float32 array in another dtype, contiguous; bfloat16 as its 16 bits, rounded to the nearest even."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(array, {"float32": np.float32, "float16": np.float16}[dtype])
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
