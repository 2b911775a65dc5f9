"""Running TensorRT engines (TensorRT for RTX and TensorRT): everything stays on the GPU but small inputs and the head.

A pass uploads ids and masks, reads the prefix where it lies, and downloads the head; keys and values of kept segments
are copied on the GPU into the prefix, and single rows of logits are fetched when asked for. Buffers are as large as the
profiles allow and never move, so that passes of one shape over one prefix can be replayed as a CUDA graph.
"""

from __future__ import annotations

import hashlib
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spot_deploy.engines import cuda
from spot_deploy.engines.contracts import (
    ITEMSIZE,
    Array,
    Compiled,
    GraphSignature,
    TargetInputs,
    TargetOutputs,
    TensorSpec,
)
from spot_deploy.engines.cuda import DeviceArray, DeviceView, Stream
from spot_deploy.engines.errors import ENVIRONMENT, SpotDeployError
from spot_deploy.engines.inspector import Layer, parse_layers
from spot_deploy.engines.prefix import DeviceSession
from spot_deploy.engines.profiles import Shape, symbol_sizes

REPLAY = "graph-replay"  # the one fault of recording that is an error
MOST_GRAPHS = 64  # of one lane: budgets times buckets, and prefixes at other addresses
DTYPES = {  # TensorRT's names
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT64": "int64",
    "INT32": "int32",
    "BOOL": "bool",
}
_REBUILD = "spot-deploy build-engine --force, on or for this GPU"
_NUMPY = {"float32": np.float32, "int64": np.int64, "bool": np.bool_}


class Engine:
    """A deserialised engine: its tensors, profiles, and execution contexts.

    Args:
        trt: the package.
        name: of the package, for errors.
        log: TensorRT's last error lines, which `logger` fills.
        compiled: the file's digest, and what its kind needs.
    """

    def __init__(
        self,
        trt: Any,
        name: str,
        path: Path,
        signature: GraphSignature,
        logger: Any,
        log: deque[str],
        compiled: Compiled,
    ):
        self.trt, self.name, self.path, self._log = trt, name, path, log
        plan = self._read(path, compiled.sha256)
        # The runtime must outlive its engines.
        self._runtime = self.made("a runtime", lambda: trt.Runtime(logger))
        self._compiled_kernels: Any = None  # of TensorRT for RTX: shared by all contexts
        self._known_kernels = compiled.kernels
        self._require_valid(plan)
        if compiled.host_code:
            self._runtime.engine_host_code_allowed = True  # these bytes are those that were built: see _read
        self.engine = self.made("an engine", lambda: self._runtime.deserialize_cuda_engine(plan))
        if compiled.weights is not None:
            self._refit(compiled.weights, logger)
        names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        reported = [(n, self.dtype(n), tuple(int(d) for d in self.engine.get_tensor_shape(n))) for n in names]
        order = {t.name: i for i, t in enumerate((*signature.inputs, *signature.outputs))}
        reported.sort(key=lambda entry: order.get(entry[0], len(order)))
        signature.require([(n, d, tuple("?" if s < 0 else s for s in shape)) for n, d, shape in reported], path.name)
        self.profiles = [
            {spec.name: self._profile_shape(spec.name, index) for spec in signature.inputs}
            for index in range(self.engine.num_optimization_profiles)
        ]

    def _read(self, path: Path, digest: str) -> memoryview:
        """A file's bytes, mapped; checked here, where they are used, as an engine may hold code for the host."""
        try:
            plan = np.memmap(path, np.uint8, mode="r").data
        except (OSError, ValueError) as error:
            raise self.failed(f"{path.name} cannot be read", str(error)) from error
        found = hashlib.sha256(plan).hexdigest()
        if found != digest:
            raise SpotDeployError(
                "engine-damaged",
                f"{path.name} is not the file that was built",
                seen=f"sha256 {found}",
                wanted=f"sha256 {digest}",
                fix=_REBUILD,
            )
        return plan

    def _require_valid(self, plan: memoryview) -> None:
        """Ask TensorRT what stands against a plan, where it can be asked (TensorRT for RTX)."""
        ask = getattr(self._runtime, "get_engine_validity", None)
        if ask is None:
            return
        validity, reasons = ask(plan)
        if validity == self.trt.EngineValidity.INVALID:
            bits = self.trt.EngineInvalidityDiagnostics.__members__
            said = [name.lower().replace("_", " ") for name, bit in bits.items() if int(bit) & int(reasons)]
            raise SpotDeployError(
                "engine-invalid",
                f"{self.name} cannot run {self.path.name} here",
                seen=", ".join(said) or f"diagnostics {int(reasons)}",
                fix=_REBUILD,
                exit_code=ENVIRONMENT,
            )

    def _refit(self, onnx: Path, logger: Any) -> None:
        """Give an engine that was built without weights those of the bundle, all of them."""
        trt = self.trt
        refitter = self.made("a refitter", lambda: trt.Refitter(self.engine, logger))
        reader = self.made("a reader of weights", lambda: trt.OnnxParserRefitter(refitter, logger))
        if reader.refit_from_file(str(onnx)) is False:
            errors = [reader.get_error(index) for index in range(reader.num_errors)]
            said = [error.desc() for error in errors if error is not None]
            raise self.failed(f"{self.name} does not take the weights of {onnx.name}", *said, code="engine-refit")
        # Weights that nobody has set count as missing only where TensorRT has merged them with others.
        unset = [name for name in refitter.get_all_weights() if not refitter.get_named_weights(name).size]
        missing = sorted({*unset, *refitter.get_missing_weights()})
        if missing:
            what = f"{onnx.name} leaves {len(missing)} weights of the engine without values"
            raise self.failed(what, ", ".join(missing[:5]), code="engine-refit")
        self.agreed("the weights", refitter.refit_cuda_engine())

    def layers(self) -> list[Layer]:
        """What the engine consists of, as the inspector tells.

        Raises:
            SpotDeployError: its JSON is not understood.
        """
        inspector = self.made("an inspector", self.engine.create_engine_inspector)
        text = inspector.get_engine_information(self.trt.LayerInformationFormat.JSON)
        try:
            return parse_layers(text)
        except (ValueError, TypeError, AttributeError) as error:
            raise self.failed("the inspector's account is not understood", str(error)) from error

    def dtype(self, name: str) -> str:
        """As in engines.contracts."""
        name = str(self.engine.get_tensor_dtype(name).name)
        return DTYPES.get(name, name.lower())

    def _profile_shape(self, name: str, index: int) -> tuple[Shape, Shape]:
        least, _, most = self.engine.get_tensor_profile_shape(name, index)
        return tuple(map(int, least)), tuple(map(int, most))

    def context(self, scratch: DeviceArray) -> Any:
        """A new execution context that works in `scratch`.

        TensorRT for RTX compiles kernels for the shapes that it meets. By default it does so in the background, and
        changes over while a request is decoded: the same pass would not give the same bits. So it compiles at once,
        and what was compiled for one context is there for the next.
        """
        trt = self.trt
        managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        strategies = getattr(trt, "DynamicShapesKernelSpecializationStrategy", None)
        if strategies is None:
            made = self.made("an execution context", lambda: self.engine.create_execution_context(managed))
        else:
            config = self.made("a runtime configuration", self.engine.create_runtime_config)
            config.set_execution_context_allocation_strategy(managed)
            config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
            if self._compiled_kernels is None:
                self._compiled_kernels = self._kernels(config)
            self.agreed("its runtime cache", config.set_runtime_cache(self._compiled_kernels))
            made = self.made("an execution context", lambda: self.engine.create_execution_context(config))
        made.set_device_memory(scratch.address, scratch.bytes)
        return made

    def _kernels(self, config: Any) -> Any:
        """A runtime cache, with what was compiled when the engine was proven: the same bits, and no wait."""
        cache = self.made("a runtime cache", config.create_runtime_cache)
        if self._known_kernels is not None:
            self.agreed("the kernels that were compiled for it", cache.deserialize(self._read(*self._known_kernels)))
        return cache

    def compiled_kernels(self) -> memoryview | None:
        """What was compiled since the engine was opened, for `Compiled.kernels`; None where there is no such thing."""
        if self._compiled_kernels is None:
            return None
        return memoryview(self.made("its compiled kernels", self._compiled_kernels.serialize))

    def choose(self, shapes: Mapping[str, Shape]) -> int:
        """The profile for the smallest passes among those that take these input shapes.

        Raises:
            SpotDeployError: none does; the error names what comes closest.
        """
        faults, fitting = [], {}
        for index, profile in enumerate(self.profiles):
            bad = [
                f"{name} {list(shape)} is not within {list(profile[name][0])} to {list(profile[name][1])}"
                for name, shape in shapes.items()
                if not all(a <= n <= b for a, n, b in zip(profile[name][0], shape, profile[name][1], strict=True))
            ]
            if not bad:
                fitting[index] = sum(math.prod(most) for _, most in profile.values())
            faults.append(bad)
        if fitting:
            return min(fitting, key=lambda index: fitting[index])
        raise SpotDeployError(
            "engine-shape",
            f"{self.path.name} was not built for such a pass",
            seen="; ".join(min(faults, key=len)[:3]),
            fix="build-engine with larger --budgets or --requests, or export with more --max-positions",
        )

    def made(self, what: str, make: Callable[[], Any]) -> Any:
        """What `make` gives, or an error: TensorRT returns None or raises."""
        self._log.clear()  # what it says now is about this
        try:
            result = make()
        except (RuntimeError, TypeError, ValueError) as error:
            raise self.failed(f"{self.name} did not give {what}", str(error), *self._log) from error
        if result is None:
            raise self.failed(f"{self.name} did not give {what}")
        return result

    def agreed(self, what: str, answer: Any) -> None:
        """An error where TensorRT answered False, or a list of what is missing."""
        if answer is False or (isinstance(answer, (list, tuple)) and answer):
            raise self.failed(f"{self.name} refuses {what}", *(map(str, answer) if answer else ()))

    def failed(self, what: str, *said: str, code: str = "engine-run") -> SpotDeployError:
        lines = [" ".join(line.split()) for line in said or self._log]
        return SpotDeployError(
            code, f"{what} ({self.path.name})", seen=" | ".join(lines) or "nothing in its log", fix=_REBUILD
        )


class _Context:
    """An execution context, at some shapes and addresses."""

    def __init__(self, engine: Engine, scratch: DeviceArray, stream: Stream):
        self._engine, self._stream = engine, stream
        self._raw, self._profile = engine.context(scratch), -1

    def prepare(self, profile: int, shapes: Mapping[str, Shape], addresses: Mapping[str, int]) -> None:
        """Set the profile, the shapes of all inputs and the addresses of all tensors."""
        agreed, context = self._engine.agreed, self._raw
        if profile != self._profile:
            agreed("its own profile", context.set_optimization_profile_async(profile, int(self._stream)))
            self._profile = profile
        for name, shape in shapes.items():
            agreed(f"{name} of {list(shape)}", context.set_input_shape(name, shape))
        for name, address in addresses.items():
            agreed(f"the address of {name}", context.set_tensor_address(name, address))
        agreed("shapes that it needs and has not", self._engine.made("shapes", context.infer_shapes))

    def output_shape(self, name: str) -> Shape:
        return tuple(int(d) for d in self._raw.get_tensor_shape(name))

    def execute(self) -> None:
        self._engine.agreed("the pass", self._raw.execute_async_v3(int(self._stream)))

    def capturable(self) -> bool:
        """Whether a pass can be recorded; only TensorRT for RTX has passes that cannot."""
        asked = getattr(self._raw, "is_stream_capturable", None)
        return asked is None or bool(asked(int(self._stream)))


@dataclass(frozen=True)
class _Recorded:
    """A pass as a graph. TensorRT wants the context that it was recorded from to stay as it was."""

    graph: cuda.Graph
    context: _Context
    shapes: dict[str, Shape]


class _Lane:
    """What one pass at a time needs: a stream, execution contexts, buffers for every tensor but the prefix."""

    def __init__(self, engine: Engine, signature: GraphSignature, outside: Sequence[str]):
        self._engine, self.stream = engine, Stream()
        self._scratch = DeviceArray("bool", [int(engine.engine.device_memory_size_v2)])
        self._context = _Context(engine, self._scratch, self.stream)
        self._recorded: dict[Any, _Recorded | None] = {}  # None: such a pass has been seen once
        self._recordable = True
        largest = [{name: most for name, (_, most) in profile.items()} for profile in engine.profiles]
        sizes = symbol_sizes(signature, largest)

        def buffer(spec: TensorSpec) -> DeviceArray:
            return DeviceArray(spec.dtype, [d if isinstance(d, int) else sizes[d] for d in spec.shape])

        self.inputs = {t.name: buffer(t) for t in signature.inputs if t.name not in outside}
        self.outputs = {t.name: buffer(t) for t in signature.outputs}

    def run(
        self, feeds: Mapping[str, Array], outside: Mapping[str, DeviceArray], head: Sequence[str]
    ) -> dict[str, Shape]:
        """Start a pass; the shapes of its outputs.

        The second pass of the same shapes over the same prefix is recorded, and those that follow are replays.

        Args:
            feeds: inputs from the host.
            outside: inputs that lie on the GPU already.
            head: outputs in which the first replay must equal what it is a replay of.

        Raises:
            SpotDeployError: TensorRT refuses, no profile fits, or a replay differs.
        """
        shapes = {n: tuple(x.shape) for n, x in feeds.items()} | {n: x.shape for n, x in outside.items()}
        key = (*shapes.values(), *(array.address for array in outside.values()))
        recorded = self._recorded.get(key)
        profile = -1 if recorded is not None else self._engine.choose(shapes)  # before anything is copied
        for name, array in feeds.items():
            self.inputs[name].upload(np.ascontiguousarray(array), self.stream)
        if recorded is not None:
            recorded.graph.launch(self.stream)
            return recorded.shapes
        tensors = {**self.inputs, **outside, **self.outputs}
        addresses = {name: array.address for name, array in tensors.items()}
        self._context.prepare(profile, shapes, addresses)
        self._context.execute()
        found = {name: self._context.output_shape(name) for name in self.outputs}
        if key in self._recorded and self._recordable and self._context.capturable():
            self._recorded.pop(key)  # to the end: the oldest is given up first
            try:
                context = _Context(self._engine, self._scratch, self.stream)
                context.prepare(profile, shapes, addresses)
                self._recorded[key] = self._record(context, found, head)
            except SpotDeployError as error:
                if error.code == REPLAY:
                    raise
                # The pass itself has been done. What cannot be recorded is run as it is from now on.
                self._recordable = False
        else:
            self._recorded[key] = None
        if len(self._recorded) > MOST_GRAPHS:
            del self._recorded[next(iter(self._recorded))]
        return found

    def _record(self, context: _Context, shapes: dict[str, Shape], head: Sequence[str]) -> _Recorded:
        """The pass that has just been run, recorded from a context that is prepared for it."""

        def outputs() -> list[bytes]:
            found = [self.fetch(name, shapes[name]) for name in head]
            self.stream.wait()
            return [array.tobytes() for array in found]

        wanted = outputs()
        context.execute()  # what it puts off until the first pass must not be recorded
        self.stream.wait()
        graph = self.stream.record(context.execute)
        graph.launch(self.stream)
        if outputs() != wanted:
            raise SpotDeployError(
                REPLAY,
                f"a replayed CUDA graph of {self._engine.path.name} gives other results than the pass itself",
                fix="report this with the versions of driver and TensorRT",
            )
        return _Recorded(graph, context, shapes)

    def fetch(self, name: str, shape: Shape, offset: int = 0) -> Array:
        """A copy of an output, or a part of it from `offset` bytes on; there once the stream has waited."""
        array: Array = np.empty(shape, _NUMPY[self.outputs[name].dtype])
        self.outputs[name].download(array, self.stream, offset)
        return array


class _Loan:
    """A lane while its outputs are needed; it goes back when nobody refers to this any more."""

    def __init__(self, lane: _Lane, free: list[_Lane]):
        self.lane = lane
        weakref.finalize(self, free.append, lane).atexit = False


class _Rows:
    """The full logits of one pass in a buffer of their own, so that the lane can run the next pass meanwhile."""

    def __init__(self, lane: _Lane, shape: Shape, free: list[DeviceArray], stream: Stream):
        source = lane.outputs["logits"]
        self._buffer = free.pop() if free else DeviceArray(source.dtype, source.shape)
        self._stream, self._row = stream, shape[1:]
        weakref.finalize(self, free.append, self._buffer).atexit = False
        cuda.copy_first(self._buffer, source, math.prod(shape) * ITEMSIZE[source.dtype], lane.stream)

    def fetch(self, index: int) -> Array:
        """A copy of one row."""
        found: Array = np.empty(self._row, _NUMPY[self._buffer.dtype])
        self._buffer.download(found, self._stream, index * found.nbytes)
        self._stream.wait()
        return found


class Target(DeviceSession):
    """A target engine (see contracts.TargetSession).

    Attributes:
        engine: what it runs.
    """

    fixed_shapes = True

    def __init__(self, engine: Engine, signature: GraphSignature):
        super().__init__(next(t.dtype for t in signature.inputs if t.name == signature.past_names[0]))
        self.engine, self._signature = engine, signature
        self._past, self._kept = signature.past_names, signature.kept_names
        self._head = signature.head_names
        self._free: list[_Lane] = []
        self._spare_rows: list[DeviceArray] = []
        self._lock = threading.Lock()

    def run(self, inputs: TargetInputs, *, keep: bool) -> TargetOutputs:
        """One pass. What it kept, and its full logits, are there until the outputs are let go."""
        loan = _Loan(self._lane(), self._free)
        lane = loan.lane
        outside = dict(zip(self._past, self.on_device(inputs.past, lane.stream), strict=True))
        shapes = lane.run(inputs.small(), outside, self._head)
        head = {name: lane.fetch(name, shapes[name]) for name in self._head}
        rows = _Rows(lane, shapes["logits"], self._spare_rows, self._copies)
        lane.stream.wait()
        wrong = np.isnan(head["top_logits"][:, 0]) | np.isnan(head["rest_lse"])
        if wrong.any():
            raise SpotDeployError(
                "engine-nan",
                f"{self.engine.path.name} gives logits that are no numbers",
                seen=f"{int(wrong.sum())} of {len(wrong)} rows",
                fix="build-engine --precision bf16 or f32: float16 overflows in some networks",
            )

        kept = [self._view(loan, name, shapes[name]) for name in self._kept] if keep else []
        return TargetOutputs.of(head, rows.fetch, kept)

    @staticmethod
    def _view(loan: _Loan, name: str, shape: Shape) -> DeviceView:
        output = loan.lane.outputs[name]
        return DeviceView(output.dtype, shape, output.address, loan)

    def _lane(self) -> _Lane:
        try:
            return self._free.pop()
        except IndexError:
            with self._lock:
                return _Lane(self.engine, self._signature, self._past)


class OrderModel:
    """An order model engine (see contracts.OrderSession)."""

    def __init__(self, engine: Engine, signature: GraphSignature):
        self.engine = engine
        self._lane, self._lock = _Lane(engine, signature, ()), threading.Lock()

    def run(self, features: Array, state_id: Array, depth: Array, masked: Array) -> Array:
        feeds = {"features": features, "state_id": state_id, "depth": depth, "masked": masked}
        with self._lock:
            shapes = self._lane.run(feeds, {}, ("log_q",))
            result = self._lane.fetch("log_q", shapes["log_q"])
            self._lane.stream.wait()
        return result
