"""OpenVINO on CPU. The only module that imports it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spot_deploy.engines.contracts import WEIGHT_PRECISIONS, Array, GraphSignature, TargetInputs, TargetOutputs
from spot_deploy.engines.errors import ENVIRONMENT, SpotDeployError, backend_missing
from spot_deploy.engines.prefix import HostSession

LAYOUT = "split"


def require() -> None:
    """Check that OpenVINO is installed.

    Raises:
        SpotDeployError: it is not (exit code 4).
    """
    try:
        import openvino  # noqa: F401
    except (ImportError, OSError) as error:
        raise backend_missing("openvino", "openvino", str(error)) from error


def versions() -> dict[str, str]:
    """Versions that decide what an engine computes."""
    import openvino

    return {"openvino": str(openvino.get_version())}


def providers() -> tuple[str, ...]:
    """What may execute."""
    return ("cpu",)


def require_device(provider: str, targets: Sequence[str] = ()) -> None:
    """Nothing to check: the CPU is there."""


def precisions() -> tuple[str, ...]:
    """What this processor computes in, the default first: bfloat16 pays where the processor has matrix units for it."""
    import openvino

    capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return (*(("bf16",) if "BF16" in capabilities else ()), "f32", *WEIGHT_PRECISIONS)


def graph_precision(precision: str) -> str:
    """The target graph that a precision runs: bfloat16 is computed from the float32 graph."""
    return "f32" if precision == "bf16" else precision


def _compile(path: Path, signature: GraphSignature, threads: int, precision: str, which: str) -> Any:
    import openvino

    hint = "f32" if precision in WEIGHT_PRECISIONS else precision
    # The precision is always explicit: the default is bfloat16 on some processors and float32 on others. So is the
    # rounding of activations: by default they become int8 in front of quantised weights, on processors that gain by it.
    settings = {
        "INFERENCE_PRECISION_HINT": hint,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
    }
    core = openvino.Core()
    try:
        model = core.read_model(path)
        compiled = core.compile_model(model, "CPU", settings)
    except RuntimeError as error:
        raise SpotDeployError(
            "engine-load",
            f"OpenVINO refuses {path.name}",
            seen=str(error).strip().splitlines()[-1],
            fix="export the bundle again; if it stays, report the message",
        ) from error
    taken = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    group = compiled.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE")
    if taken != hint or group != 0:
        raise SpotDeployError(
            "engine-precision",
            "OpenVINO took another precision than asked for",
            seen=f"{taken}, dynamic quantisation in groups of {group}",
            wanted=f"{hint}, no dynamic quantisation",
            fix="build-engine --precision f32",
            exit_code=ENVIRONMENT,
        )
    reported = []
    for port in [*compiled.inputs, *compiled.outputs]:
        shape = tuple(d.get_length() if d.is_static else str(d) for d in port.get_partial_shape())
        name = (
            "bool" if port.get_element_type().get_type_name() == "boolean" else port.get_element_type().to_dtype().name
        )
        reported.append((port.get_any_name(), name, shape))
    signature.require(reported, which)
    return compiled


class _Requests:
    """A compiled model with as many inference requests as there are results in use.

    A request's output tensors hold its results until it runs again. Whoever has the results therefore keeps the
    request; it is used again when nobody has them any more.
    """

    def __init__(self, compiled: Any):
        self._compiled = compiled
        self._free: list[Any] = []

    def infer(self, feeds: dict[str, Array]) -> _Results:
        """Run. Safe to call from several threads."""
        try:
            request = self._free.pop()
        except IndexError:
            request = self._compiled.create_infer_request()
        request.infer(feeds, share_inputs=True, share_outputs=True)
        results = _Results(request)
        weakref.finalize(results, self._free.append, request).atexit = False
        return results


class _Results:
    """The output tensors of one run, unchanged for as long as this object lives."""

    def __init__(self, request: Any):
        self._request = request

    def copy(self, name: str) -> Array:
        result: Array = self._request.get_tensor(name).data.copy()
        return result

    def row(self, name: str, index: int) -> Array:
        """A copy of one row of a tensor."""
        result: Array = self._request.get_tensor(name).data[index].copy()
        return result


class Target(HostSession):
    """The target graph on OpenVINO (see contracts.TargetSession)."""

    def __init__(self, path: Path, signature: GraphSignature, threads: int, precision: str, provider: str = "cpu"):
        self._model = _Requests(_compile(path, signature, threads, precision, "target"))
        self._past, self._kept = signature.past_names, signature.kept_names
        self._head = signature.head_names

    def run(self, inputs: TargetInputs, *, keep: bool) -> TargetOutputs:
        results = self._model.infer(inputs.feeds(self._past))
        head = {name: results.copy(name) for name in self._head}
        # Rows are seldom asked for, and all of them are large: they are fetched where the pass left them.
        row = functools.partial(results.row, "logits")
        return TargetOutputs.of(head, row, [results.copy(n) for n in self._kept] if keep else [])


class OrderModel:
    """The order model on OpenVINO (see contracts.OrderSession)."""

    def __init__(self, path: Path, signature: GraphSignature, threads: int, precision: str, provider: str = "cpu"):
        self._model = _Requests(_compile(path, signature, threads, precision, "order model"))

    def run(self, features: Array, state_id: Array, depth: Array, masked: Array) -> Array:
        feeds = {"features": features, "state_id": state_id, "depth": depth, "masked": masked}
        return self._model.infer(feeds).copy("log_q")
