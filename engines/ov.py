"""OpenVINO on CPU. The only module that imports it."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import Any

from spot_deploy.engines.contracts import Array, GraphSignature, TargetInputs, TargetOutputs
from spot_deploy.engines.errors import ENVIRONMENT, SpotDeployError

LAYOUT = "split"


def require() -> None:
    """Check that OpenVINO is installed.

    Raises:
        SpotDeployError: it is not (exit code 4).
    """
    if importlib.util.find_spec("openvino") is None:
        raise SpotDeployError(
            "backend-missing",
            "the backend openvino is not installed",
            fix='pip install "spot-deploy[openvino]"',
            exit_code=ENVIRONMENT,
        )


def versions() -> dict[str, str]:
    """Versions that decide what an engine computes."""
    import openvino

    return {"openvino": str(openvino.get_version())}


def providers() -> list[str]:
    """What executes."""
    return ["CPU"]


def precisions() -> tuple[str, ...]:
    """What this processor computes in, the default first: bfloat16 pays where the processor has matrix units for it."""
    import openvino

    capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return ("bf16", "f32") if "BF16" in capabilities else ("f32",)


def _compile(path: Path, signature: GraphSignature, threads: int, precision: str, which: str) -> Any:
    import openvino

    # The precision is always explicit: the default is bfloat16 on some processors and float32 on others.
    settings = {
        "INFERENCE_PRECISION_HINT": precision,
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
    if taken != precision:
        raise SpotDeployError(
            "engine-precision",
            "OpenVINO took another precision than asked for",
            seen=taken,
            wanted=precision,
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


class _PerThread:
    """A compiled model with one inference request per thread: a request may not be shared."""

    def __init__(self, compiled: Any):
        self._compiled = compiled
        self._local = threading.local()

    def infer(self, feeds: dict[str, Array]) -> Any:
        """Run; returns the thread's request, whose output tensors hold the results until the next call."""
        if not hasattr(self._local, "request"):
            self._local.request = self._compiled.create_infer_request()
        request = self._local.request
        request.infer(feeds, share_inputs=True, share_outputs=True)
        return request


class Target:
    """The target graph on OpenVINO (see contracts.TargetSession).."""

    def __init__(self, path: Path, signature: GraphSignature, threads: int, precision: str):
        self._model = _PerThread(_compile(path, signature, threads, precision, "target"))
        self._past, self._kept = signature.past_names, signature.kept_names
        self._raw = any(t.name == "rest_lse_raw" for t in signature.outputs)

    def run(self, inputs: TargetInputs, *, keep: bool) -> TargetOutputs:
        request = self._model.infer(inputs.feeds(self._past))

        def copy(name: str) -> Array:
            result: Array = request.get_tensor(name).data.copy()
            return result

        logits = copy("logits")
        return TargetOutputs(
            top_logits=copy("top_logits"),
            top_ids=copy("top_ids"),
            rest_lse=copy("rest_lse"),
            rest_lse_raw=copy("rest_lse_raw") if self._raw else None,
            row=logits.__getitem__,
            kept=[copy(n) for n in self._kept] if keep else [],
        )


class OrderModel:
    """The order model on OpenVINO (see contracts.OrderSession)."""

    def __init__(self, path: Path, signature: GraphSignature, threads: int, precision: str):
        self._model = _PerThread(_compile(path, signature, threads, precision, "order model"))

    def run(self, features: Array, state_id: Array, depth: Array, masked: Array) -> Array:
        feeds = {"features": features, "state_id": state_id, "depth": depth, "masked": masked}
        result: Array = self._model.infer(feeds).get_tensor("log_q").data.copy()
        return result
