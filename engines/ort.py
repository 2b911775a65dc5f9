"""ONNX Runtime. The only module that imports it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spot_deploy.engines import cuda, trt
from spot_deploy.engines.contracts import (
    WEIGHT_PRECISIONS,
    Array,
    GraphSignature,
    TargetInputs,
    TargetOutputs,
    TargetSession,
)
from spot_deploy.engines.cuda import DeviceView
from spot_deploy.engines.errors import ENVIRONMENT, SpotDeployError, backend_missing, refuse_clash
from spot_deploy.engines.prefix import DeviceSession, HostSession
from spot_deploy.engines.profiles import Sizes

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
DEVICE = "cuda"  # where tensors of the GPU providers lie, in ONNX Runtime's words
# By default CUDA multiplies float32 with 10 bits (TF32).
OPTIONS = {"cuda": {"use_tf32": "0"}}
SHAPES = ("trt_profile_min_shapes", "trt_profile_opt_shapes", "trt_profile_max_shapes")
LAYOUT = "split"
_DTYPES = {"tensor(float)": "float32", "tensor(int64)": "int64", "tensor(bool)": "bool", "tensor(float16)": "float16"}


@functools.cache
def require() -> None:
    """Check that exactly one ONNX Runtime package is installed.

    Raises:
        SpotDeployError: none, or several that overwrite each other (exit code 4).
    """
    try:
        import onnxruntime  # noqa: F401
    except (ImportError, OSError) as error:
        raise backend_missing("onnxruntime", "cpu", str(error)) from error
    refuse_clash("ONNX Runtime", ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino"))


def versions() -> dict[str, str]:
    """Versions that decide what an engine computes."""
    import onnxruntime

    return {"onnxruntime": onnxruntime.__version__}


def providers() -> tuple[str, ...]:
    """What may execute, the default first."""
    return tuple(PROVIDERS)


def require_device(provider: str, targets: Sequence[str] = ()) -> None:
    """Check that a provider can work here, before a session falls back to the CPU without a word.

    Raises:
        SpotDeployError: the package lacks it, or a library that it loads is missing (exit code 4).
    """
    import onnxruntime

    if provider == "cpu":
        return
    what = f"ONNX Runtime cannot run on {provider} here"

    def missing(seen: str, wanted: str, fix: str) -> SpotDeployError:
        return SpotDeployError("provider", what, seen=seen, wanted=wanted, fix=fix, exit_code=ENVIRONMENT)

    # The list says what the package was built with, not what works.
    if PROVIDERS[provider] not in onnxruntime.get_available_providers():
        raise missing(
            "the installed package is built without it",
            "onnxruntime-gpu",
            'pip uninstall onnxruntime, then pip install "spot-deploy[gpu]"',
        )
    if lacking := cuda.missing_driver():
        raise missing(lacking, "an NVIDIA driver and a GPU", "install the driver, or --provider cpu")
    cuda.versions()  # raises where cuda-python is missing
    if provider == "tensorrt":
        trt.FULL.load_libraries()
    if provider == "tensorrt" and not _loads("libnvinfer.so.10"):
        newer = "; libnvinfer.so.11 is there, which this package cannot use" if _loads("libnvinfer.so.11") else ""
        raise missing(
            f"libnvinfer.so.10 cannot be loaded{newer}",
            "TensorRT 10, which the package is linked with",
            "pip install 'tensorrt>=10,<11', which needs NVIDIA's own index, or --provider cuda",
        )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def precisions() -> tuple[str, ...]:
    """What the CPU provider computes in, the default first; it has no bfloat16 kernels."""
    return ("f32", *WEIGHT_PRECISIONS)


def graph_precision(precision: str) -> str:
    """The target graph that a precision runs: the one written in it."""
    return precision


def _check_precision(precision: str) -> None:
    if precision not in precisions():
        raise ValueError(f"the CPU provider does not compute in {precision}")


def provider_options(provider: str, signature: GraphSignature, sizes: Sizes | None) -> dict[str, str]:
    """Options of a provider, with the shapes that TensorRT shall compile for.

    Without shapes its provider compiles anew whenever a pass is larger than all before, which takes seconds to minutes.
    It is one range for every axis, so it covers combinations that no pass has, too.
    """
    options = dict(OPTIONS.get(provider, {}))
    for which, name in enumerate(SHAPES if sizes is not None else ()):
        assert sizes is not None
        shapes = {t.name: [d if isinstance(d, int) else sizes[d][which] for d in t.shape] for t in signature.inputs}
        options[name] = ",".join(f"{tensor}:{'x'.join(map(str, shape))}" for tensor, shape in shapes.items())
    return options


def _open(path: Path, signature: GraphSignature, threads: int, which: str, provider: str, sizes: Sizes | None) -> Any:
    import onnxruntime

    require_device(provider)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Spinning threads starve whatever else the embedding program runs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if provider != "cpu":
        cuda.require_memory(path.with_name("weights.safetensors") if signature.past_names else path)
        onnxruntime.preload_dlls()  # CUDA and cuDNN from their own packages, where they are not installed otherwise
    try:
        chosen = (PROVIDERS[provider], provider_options(provider, signature, sizes))
        session = onnxruntime.InferenceSession(path, options, providers=[chosen])
    except Exception as error:  # ONNX Runtime has no common base class for its errors
        raise SpotDeployError(
            "engine-load",
            f"ONNX Runtime refuses {path.name}",
            seen=str(error).splitlines()[0],
            fix="export the bundle again; if it stays, report the message",
        ) from error
    # get_available_providers() lists what could be; only the session tells what runs.
    if session.get_providers()[0] != PROVIDERS[provider]:
        raise SpotDeployError(
            "engine-provider",
            "ONNX Runtime took another provider than asked for",
            seen=str(session.get_providers()),
            wanted=PROVIDERS[provider],
            fix="read its own messages above: they name the library that it could not load; or --provider cpu",
            exit_code=ENVIRONMENT,
        )
    reported = [(n.name, _DTYPES.get(n.type, n.type), tuple(n.shape)) for n in session.get_inputs()]
    reported += [(n.name, _DTYPES.get(n.type, n.type), tuple(n.shape)) for n in session.get_outputs()]
    signature.require(reported, which)
    return session


def Target(  # noqa: N802 - what the other backend modules have as a class
    path: Path,
    signature: GraphSignature,
    threads: int,
    precision: str = "f32",
    provider: str = "cpu",
    sizes: Sizes | None = None,
) -> TargetSession:
    """The target graph on a provider of ONNX Runtime."""
    _check_precision(precision)
    session = _open(path, signature, threads, "target", provider, sizes)
    return HostTarget(session, signature) if provider == "cpu" else DeviceTarget(session, signature)


class HostTarget(HostSession):
    """On the CPU (see contracts.TargetSession)."""

    def __init__(self, session: Any, signature: GraphSignature):
        self._session = session
        self._past, self._kept = signature.past_names, signature.kept_names
        self._head = signature.head_names

    def run(self, inputs: TargetInputs, *, keep: bool) -> TargetOutputs:
        names = [*self._head, "logits", *(self._kept if keep else [])]
        found = dict(zip(names, self._session.run(names, inputs.feeds(self._past)), strict=True))
        logits = found["logits"]

        def row(index: int) -> Array:
            result: Array = logits[index]
            return result

        return TargetOutputs.of(found, row, [found[n] for n in self._kept] if keep else [])


class DeviceTarget(DeviceSession):
    """On a GPU (see contracts.TargetSession), with IO binding: the prefix lies there, and all but heads stays there."""

    def __init__(self, session: Any, signature: GraphSignature):
        dtypes = {t.name: t.dtype for t in (*signature.inputs, *signature.outputs)}
        super().__init__(dtypes[signature.past_names[0]])
        self._session, self._dtypes = session, dtypes
        self._past, self._kept = signature.past_names, signature.kept_names
        self._head = signature.head_names

    def run(self, inputs: TargetInputs, *, keep: bool) -> TargetOutputs:
        binding = self._session.io_binding()
        for name, array in inputs.small().items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        past = self.on_device(inputs.past, self._copies)
        for name, buffer in zip(self._past, past, strict=True):
            binding.bind_input(name, DEVICE, 0, np.dtype(buffer.dtype), buffer.shape, buffer.address)
        stay = ["logits", *(self._kept if keep else [])]
        for name in self._head:
            binding.bind_output(name)
        for name in stay:
            binding.bind_output(name, DEVICE)
        self._session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        values = dict(zip((*self._head, *stay), binding.get_outputs(), strict=True))
        head = {name: values[name].numpy() for name in self._head}
        views = {n: DeviceView(self._dtypes[n], values[n].shape(), values[n].data_ptr(), values[n]) for n in stay}

        def row(index: int) -> Array:
            logits = views["logits"]
            found: Array = np.empty(logits.shape[1:], np.float32)
            logits.download(found, self._copies, index * found.nbytes)
            self._copies.wait()
            return found

        return TargetOutputs.of(head, row, [views[name] for name in self._kept] if keep else [])


class OrderModel:
    """The order model on ONNX Runtime (see contracts.OrderSession)."""

    def __init__(
        self,
        path: Path,
        signature: GraphSignature,
        threads: int,
        precision: str = "f32",
        provider: str = "cpu",
        sizes: Sizes | None = None,
    ):
        _check_precision(precision)
        self._session = _open(path, signature, threads, "order model", provider, sizes)

    def run(self, features: Array, state_id: Array, depth: Array, masked: Array) -> Array:
        feeds = {"features": features, "state_id": state_id, "depth": depth, "masked": masked}
        result: Array = self._session.run(["log_q"], feeds)[0]
        return result
