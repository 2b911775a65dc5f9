"""Doubles of the CUDA runtime and of TensorRT's: device memory is host memory, an engine is an ONNX file.

Work on a stream is done when the stream is waited for and not before, so that whoever reads too early reads garbage.
Every copy is checked against what was allocated. Names are those of the real modules (see test_trt_run).
"""

from __future__ import annotations

import ctypes
import json
from collections import defaultdict
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import tensorrt_rtx

# What TensorRT itself lacks, as attributes of the module; see test_trt_run.
RTX_ONLY = {
    "ComputeCapability", "DynamicShapesKernelSpecializationStrategy", "EngineInvalidityDiagnostics", "EngineValidity",
}  # fmt: skip
NUMPY = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}
NAMES = {"tensor(float)": "FLOAT", "tensor(int64)": "INT64", "tensor(bool)": "BOOL"}


class Status(int):
    """A status: 0 is success."""

    name = "cudaSuccess"


class Failure(Status):
    name = "cudaErrorMemoryAllocation"


class Invalidated(Status):
    name = "cudaErrorStreamCaptureInvalidated"


class CudaRuntime:
    """What engines.cuda uses of cuda.bindings.runtime. `memory`: bytes that can be allocated."""

    cudaMemcpyKind = SimpleNamespace(  # noqa: N815
        cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDeviceToDevice=3
    )
    cudaDeviceAttr = SimpleNamespace(  # noqa: N815
        cudaDevAttrComputeCapabilityMajor=75, cudaDevAttrComputeCapabilityMinor=76
    )

    def __init__(self, memory: int = 1 << 30):
        self.memory, self.blocks, self.queues, self.handles = memory, {}, defaultdict(list), 0
        self.copied = defaultdict(int)
        self.capturing, self.launches, self.captures = {}, 0, True

    def _inside(self, address: int, count: int) -> None:
        for start, block in self.blocks.items():
            if start <= address < start + len(block):
                assert address + count <= start + len(block), "copies beyond an allocation"
                return
        raise AssertionError(f"{address} is no device memory")

    def cudaMalloc(self, size):  # noqa: N802
        assert not self.capturing, "nothing may be allocated while a stream is recorded"
        if sum(map(len, self.blocks.values())) + size > self.memory:
            return Failure(2), None
        block = (ctypes.c_ubyte * size)()
        ctypes.memset(block, 0xFB, size)  # fresh memory holds nothing that one may use
        self.blocks[ctypes.addressof(block)] = block
        return Status(0), ctypes.addressof(block)

    def cudaFree(self, address):  # noqa: N802
        del self.blocks[address]
        return (Status(0),)

    def cudaMemGetInfo(self):  # noqa: N802
        return Status(0), self.memory - sum(map(len, self.blocks.values())), self.memory

    def cudaGetDeviceProperties(self, device):  # noqa: N802
        return Status(0), SimpleNamespace(name=b"GPU of memory\0\0")

    def cudaDriverGetVersion(self):  # noqa: N802
        return Status(0), 13010

    def cudaDeviceGetAttribute(self, attribute, device):  # noqa: N802
        return Status(0), {75: 8, 76: 9}[attribute]

    def cudaStreamCreateWithFlags(self, flags):  # noqa: N802
        assert flags == 1, "other threads' work on the default stream would fail while this one is recorded"
        self.handles += 1
        return Status(0), self.handles

    def cudaRuntimeGetVersion(self):  # noqa: N802
        return Status(0), 13010

    def cudaStreamDestroy(self, stream):  # noqa: N802
        return (Status(0),)

    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)  # noqa: N815

    def cudaStreamBeginCapture(self, stream, mode):  # noqa: N802
        assert stream not in self.capturing
        self.capturing[stream] = len(self.queues[stream])
        return (Status(0),)

    def cudaStreamEndCapture(self, stream):  # noqa: N802
        first = self.capturing.pop(stream)
        if not self.captures:
            del self.queues[stream][first:]
            return Invalidated(901), None
        recorded, self.queues[stream] = self.queues[stream][first:], self.queues[stream][:first]
        return Status(0), recorded

    def cudaGraphInstantiate(self, graph, flags):  # noqa: N802
        return Status(0), tuple(graph)

    def cudaGraphDestroy(self, graph):  # noqa: N802
        return (Status(0),)

    def cudaGraphExecDestroy(self, graph):  # noqa: N802
        return (Status(0),)

    def cudaGraphLaunch(self, graph, stream):  # noqa: N802
        self.launches += 1
        self.queues[stream] += graph
        return (Status(0),)

    def cudaStreamSynchronize(self, stream):  # noqa: N802
        assert stream not in self.capturing, "waiting ends a capture"
        queue = self.queues[stream]
        while queue:
            queue.pop(0)()
        return (Status(0),)

    def cudaMemsetAsync(self, address, value, count, stream):  # noqa: N802
        self._inside(address, count)
        self.queues[stream].append(lambda: ctypes.memset(address, value, count))
        return (Status(0),)

    def cudaMemcpyAsync(self, to, source, count, kind, stream):  # noqa: N802
        for address, device in ((to, kind in (1, 3)), (source, kind in (2, 3))):
            if device:
                self._inside(address, count)
        self.copied[kind] += count
        self.queues[stream].append(lambda: ctypes.memmove(to, source, count))
        return (Status(0),)

    def cudaMemcpy2DAsync(self, to, to_pitch, source, pitch, width, height, kind, stream):  # noqa: N802
        assert width <= min(to_pitch, pitch)
        self._inside(to, (height - 1) * to_pitch + width)
        self._inside(source, (height - 1) * pitch + width)
        self.copied[kind] += width * height

        def copy() -> None:
            for row in range(height):
                ctypes.memmove(to + row * to_pitch, source + row * pitch, width)

        self.queues[stream].append(copy)
        return (Status(0),)


class TensorIOMode(Enum):
    INPUT = 1
    OUTPUT = 2


class ExecutionContext:
    """Runs the ONNX file on what lies at the addresses that it was given."""

    def __init__(self, engine):
        self._engine, self._shapes, self._addresses, self._profile = engine, {}, {}, None
        self._scratch, self.ran = None, False

    def set_optimization_profile_async(self, profile_index, stream_handle):
        self._profile, self._shapes = profile_index, {}
        return 0 <= profile_index < self._engine.num_optimization_profiles

    @property
    def is_stream_capturable(self):
        if not self._engine.package.rtx:
            raise AttributeError("is_stream_capturable")
        return lambda stream: True

    def set_device_memory(self, memory, size):
        assert size >= self._engine.device_memory_size_v2
        self._engine.cuda._inside(memory, size)
        self._scratch = memory

    def set_input_shape(self, name, shape):
        least, _, most = self._engine.get_tensor_profile_shape(name, self._profile)
        if not all(a <= n <= b for a, n, b in zip(least, shape, most, strict=True)):
            return False
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name, memory):
        self._addresses[name] = memory
        return True

    def infer_shapes(self):
        return [i.name for i in self._engine.session.get_inputs() if i.name not in self._shapes]

    def get_tensor_shape(self, name):
        sizes = {}
        for tensor in self._engine.session.get_inputs():
            for symbol, size in zip(tensor.shape, self._shapes[tensor.name], strict=True):
                sizes[symbol] = size
        output = next(t for t in self._engine.session.get_outputs() if t.name == name)
        return [d if isinstance(d, int) else sizes[d] for d in output.shape]

    def execute_async_v3(self, stream_handle):
        if self._engine.cuda.capturing:
            assert self.ran, "the first pass of a context may do what cannot be recorded"
        self.ran = True
        if self._engine.without_weights:
            return False
        engine, shapes, addresses = self._engine, dict(self._shapes), dict(self._addresses)
        outputs = [t.name for t in engine.session.get_outputs()]
        sizes = {name: self.get_tensor_shape(name) for name in outputs}
        if self._scratch is None or any(name not in addresses for name in (*shapes, *outputs)):
            return False

        def at(tensor, shape):
            kind = NUMPY[tensor.type]
            count = int(np.prod(shape)) * np.dtype(kind).itemsize
            engine.cuda._inside(addresses[tensor.name], count)
            memory = (ctypes.c_ubyte * count).from_address(addresses[tensor.name])
            return np.frombuffer(memory, kind).reshape(shape)

        def work() -> None:
            feeds = {t.name: at(t, shapes[t.name]) for t in engine.session.get_inputs()}
            for tensor, value in zip(engine.session.get_outputs(), engine.session.run(None, feeds), strict=True):
                at(tensor, sizes[tensor.name])[...] = engine.spoil(tensor.name, value)

        engine.cuda.queues[stream_handle].append(work)
        return True


class CudaEngine:
    """An engine whose plan names an ONNX file and its profiles."""

    device_memory_size_v2 = 4096

    def __init__(self, plan, cuda, spoil, package):
        self.package = package
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(plan["onnx"], options, providers=["CPUExecutionProvider"])
        self.onnx = plan["onnx"]
        self.cuda, self.spoil, self._profiles = cuda, spoil, plan["profiles"]
        self.without_weights, self.told = plan["stripped"], plan["layers"]
        self._tensors = {t.name: t for t in (*self.session.get_inputs(), *self.session.get_outputs())}
        self.num_io_tensors, self.num_optimization_profiles = len(self._tensors), len(self._profiles)

    def get_tensor_name(self, index):
        return sorted(self._tensors)[index]  # no order that one may rely on

    def get_tensor_mode(self, name):
        return TensorIOMode.INPUT if name in self._profiles[0] else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name):
        return SimpleNamespace(name=NAMES[self._tensors[name].type])

    def get_tensor_shape(self, name):
        return [d if isinstance(d, int) else -1 for d in self._tensors[name].shape]

    def get_tensor_profile_shape(self, name, profile_index):
        return self._profiles[profile_index][name]

    def create_engine_inspector(self):
        return EngineInspector(self.told)

    def create_runtime_config(self):
        chosen, caches = [], []
        return SimpleNamespace(
            dynamic_shapes_kernel_specialization_strategy=None,
            set_execution_context_allocation_strategy=chosen.append,
            create_runtime_cache=lambda: RuntimeCache(self.cuda),
            set_runtime_cache=lambda cache: caches.append(cache) is None,
            chosen=chosen,
            caches=caches,
        )

    def create_execution_context(self, runtime_config):
        if not self.package.rtx:
            assert runtime_config == tensorrt_rtx.ExecutionContextAllocationStrategy.USER_MANAGED
            return ExecutionContext(self)
        self.caches = [*getattr(self, "caches", []), *runtime_config.caches]
        assert len(set(map(id, self.caches))) == 1, "what one context compiled is lost on the next"
        wanted = tensorrt_rtx.DynamicShapesKernelSpecializationStrategy.EAGER
        assert runtime_config.dynamic_shapes_kernel_specialization_strategy == wanted
        assert runtime_config.chosen == [tensorrt_rtx.ExecutionContextAllocationStrategy.USER_MANAGED]
        return ExecutionContext(self)


class RuntimeCache:
    """Holds what it has been given; another driver's is refused. A current CUDA context must be there."""

    def __init__(self, cuda):
        self.cuda, self.loaded = cuda, None

    def _environment(self):
        assert self.cuda.blocks, "nothing has made a CUDA context yet"
        return f"kernels for driver {self.cuda.cudaDriverGetVersion()[1]}".encode()

    def serialize(self):
        return self._environment()

    def deserialize(self, blob):
        self.loaded = bytes(blob)
        return self.loaded == self._environment()


class EngineInspector:
    def __init__(self, layers):
        self._layers = layers

    def get_engine_information(self, format):
        assert format == tensorrt_rtx.LayerInformationFormat.JSON
        return json.dumps({"Layers": self._layers, "Bindings": []})


class Refitter:
    """Knows the initialisers of the ONNX file as weights."""

    def __init__(self, engine, logger):
        self.engine, self.values, self.merged = engine, {}, []
        self.names = [w.name for w in onnx.load(engine.onnx, load_external_data=False).graph.initializer]

    def get_all_weights(self):
        return self.names

    def get_named_weights(self, weights_name):
        return SimpleNamespace(size=self.values.get(weights_name, 0))

    def get_missing_weights(self):
        return self.merged

    def refit_cuda_engine(self):
        self.engine.without_weights = bool(set(self.names) - set(self.values))
        return not self.engine.without_weights


class OnnxParserRefitter:
    """Reads all initialisers but those that `forgets` names."""

    forgets = ()
    num_errors = 0

    def __init__(self, refitter, logger):
        self._refitter = refitter

    def refit_from_file(self, model):
        if not Path(model).is_file():
            self.num_errors = 1
            return False
        read = [w.name for w in onnx.load(model, load_external_data=False).graph.initializer]
        self._refitter.values |= {name: 1 for name in read if name not in self.forgets}
        return True

    def get_error(self, index):
        return SimpleNamespace(desc=lambda: "Failed to open file")


class Runtime:
    """Takes plans of `write_plan`, unless told to refuse."""

    engine_host_code_allowed = False

    def __init__(self, logger, package):
        self._logger, self._package = logger, package

    def get_engine_validity(self, buffer):
        return self._package.validity

    def deserialize_cuda_engine(self, serialized_engine):
        plan, refuse = json.loads(bytes(serialized_engine)), self._package.refuse
        if plan["host_code"] and not self.engine_host_code_allowed:
            refuse = "engine_host_code_allowed is not set"
        if refuse is not None:
            self._logger.log(tensorrt_rtx.ILogger.ERROR, refuse)
            return None
        return CudaEngine(plan, self._package.cuda, self._package.spoil, self._package)


class FullRuntime(Runtime):
    """TensorRT's: plans cannot be asked whether they fit."""

    @property
    def get_engine_validity(self):
        raise AttributeError("get_engine_validity")


class TensorRt:
    """The runtime half of the package; all else is the real one's.

    Args:
        refuse: why no plan is taken.
        spoil: changes outputs, by name.
        validity: what TensorRT says of a plan before it is taken.
        rtx: TensorRT for RTX; else TensorRT, which lacks some of its names.
    """

    __version__ = tensorrt_rtx.__version__
    Refitter, OnnxParserRefitter = Refitter, OnnxParserRefitter

    def __init__(self, cuda, refuse=None, spoil=lambda name, value: value, validity=None, rtx=True):
        self.rtx = rtx
        self.cuda, self.refuse, self.spoil = cuda, refuse, spoil
        self.validity = validity or (tensorrt_rtx.EngineValidity.VALID, 0)

    def __getattr__(self, name):
        if not self.rtx and name in RTX_ONLY:
            raise AttributeError(name)
        return getattr(tensorrt_rtx, name)

    def Runtime(self, logger):  # noqa: N802
        return (Runtime if self.rtx else FullRuntime)(logger, self)


def write_plan(path: Path, onnx: Path, profiles, *, stripped=False, host_code=False, dtype="Float") -> Path:
    """An engine file for the double; profiles as `Profile.shapes` gives them; dtype in the inspector's words."""
    tensor = {"Name": "x", "Dimensions": [-1], "Format/Datatype": dtype}
    layers = [{"Name": "gemm", "LayerType": "gemm", "Inputs": [tensor], "Outputs": [tensor], "TacticName": "sgemm"}]
    plan = {"onnx": str(onnx), "profiles": profiles, "stripped": stripped, "host_code": host_code, "layers": layers}
    path.write_text(json.dumps(plan))
    return path
