"""TensorRT for RTX and TensorRT. The only module that imports either; one piece of code serves both.

TensorRT for RTX builds engines ahead of time for named compute capabilities, on machines without a GPU too. TensorRT
builds for the GPU that is present. Running is in trt_run.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spot_deploy.engines import cuda, trt_run
from spot_deploy.engines.contracts import Compiled, GraphSignature, TargetShape
from spot_deploy.engines.errors import ENVIRONMENT, SpotDeployError, refuse_clash, usage_error
from spot_deploy.engines.files import atomic_path, sha256
from spot_deploy.engines.inspector import Layer
from spot_deploy.engines.profiles import Limits, Shape, buffer_bytes, order_profile, target_profiles

Shapes = Mapping[str, tuple[Shape, Shape, Shape]]  # by input: least, best, largest

_INSTALL = {
    "tensorrt_rtx": ('pip install "spot-deploy[rtx]"', ""),
    "tensorrt": (
        'pip install --extra-index-url https://pypi.nvidia.com "spot-deploy[tensorrt]"',
        "; its libraries are not on PyPI, only on NVIDIA's own index",
    ),
}
_HARDWARE = {"same-sm": "SAME_COMPUTE_CAPABILITY", "ampere-plus": "AMPERE_PLUS"}
_CUDA_MAJORS = range(11, 20)  # packages exist for each, and write the same folder
_LOG_LINES = 4  # of TensorRT's log that an error quotes
_NO_DRIVER = "cudaError 35"
_CACHE_FORMAT = b"spot-deploy timing cache 1"


@dataclass(frozen=True)
class BuildJob:
    """One engine to build.

    Attributes:
        role: the graph's name in the manifest, and the engine file's stem.
        path: the ONNX file, beside its weights.
        signature: what the network must take and give.
        profiles: by name, the shapes that the engine is made for.
    """

    role: str
    path: Path
    signature: GraphSignature
    profiles: Mapping[str, Shapes]

    @property
    def largest(self) -> list[dict[str, Shape]]:
        """By profile, the largest shape of every input."""
        return [{name: most for name, (_, _, most) in shapes.items()} for shapes in self.profiles.values()]


@dataclass(frozen=True)
class Settings:
    """How engines are built: compute capabilities (`choose_capabilities`), ways to be portable, without weights."""

    capabilities: tuple[str, ...] = ()
    portable: tuple[str, ...] = ()
    strip: bool = False


def target_job(role: str, path: Path, signature: GraphSignature, shape: TargetShape, limits: Limits) -> BuildJob:
    """A target graph with the profiles of `profiles.target_profiles`."""
    profiles = {p.role: p.shapes(shape) for p in target_profiles(limits)}
    return BuildJob(role, path, signature, profiles)


def order_job(path: Path, signature: GraphSignature, limits: Limits) -> BuildJob:
    """The order model with its one profile, `order`."""
    counts = order_profile(limits)

    def shape(dims: Sequence[int | str], count: int) -> Shape:
        return tuple(d if isinstance(d, int) else count for d in dims)

    least, best, most = ({t.name: shape(t.shape, count) for t in signature.inputs} for count in counts)
    return BuildJob(
        "order", path, signature, {"order": {name: (least[name], best[name], most[name]) for name in least}}
    )


class TensorRT:
    """One of the two packages, with the functions that every backend module has, and `build`.

    Args:
        package: `tensorrt_rtx` or `tensorrt`.
    """

    LAYOUT = "packed"

    def __init__(self, package: str) -> None:
        self._package = package
        self.name = package.replace("_", "-")
        self.ahead_of_time = package == "tensorrt_rtx"

    def require(self) -> None:
        """Check that the package is installed.

        Raises:
            SpotDeployError: it is not (exit code 4; the error names the extra).
        """
        if importlib.util.find_spec(self._package) is None:
            raise self._missing()
        self._import()
        refuse_clash(self.name, (f"{self.name}-cu{major}-bindings" for major in _CUDA_MAJORS))

    def _missing(self, seen: str = "") -> SpotDeployError:
        command, note = _INSTALL[self._package]
        what = f"the backend {self.name} is not installed{note}"
        return SpotDeployError("backend-missing", what, seen=seen, fix=command, exit_code=ENVIRONMENT)

    def _import(self) -> Any:
        try:
            return importlib.import_module(self._package)
        except (ImportError, OSError) as error:  # a wheel without the libraries it binds to
            raise self._missing(str(error)) from error

    def load_libraries(self) -> None:
        """Load the package's libraries for others that want them by name; they lie on no search path."""
        with contextlib.suppress(ImportError, OSError):
            importlib.import_module(self._package)

    def versions(self) -> dict[str, str]:
        """Versions that decide what an engine computes."""
        return {self.name: str(self._import().__version__)} | cuda.versions()

    def providers(self) -> tuple[str, ...]:
        """What executes."""
        return ("gpu",)

    def graph_precision(self, precision: str) -> str:
        """The graph's own: TensorRT computes in what the graph is written in."""
        return precision

    def require_device(self, provider: str, targets: Sequence[str] = ()) -> None:
        """Check, before any TensorRT runtime object, that there is a driver and a GPU that an engine was built for.

        Raises:
            SpotDeployError: there is not, or cuda-python is not installed (exit code 4).
        """
        self._require_driver("run")
        found = cuda.capability()
        if targets and found not in targets:
            raise SpotDeployError(
                "engine-capability",
                f"the {self.name} engine was built for other GPUs",
                seen=found,
                wanted=", ".join(targets),
                fix="build-engine " + " ".join(f"--target {t}" for t in (*targets, found)),
                exit_code=ENVIRONMENT,
            )

    def precisions(self) -> tuple[str, ...]:
        """Graphs that can be built, the default first."""
        return ("bf16", "f16", "f32")

    def capabilities(self) -> tuple[str, ...]:
        """Compute capabilities that engines can be built for ahead of time: `sm86`, ...; empty for `tensorrt`."""
        if not self.ahead_of_time:
            return ()
        names = self._import().ComputeCapability.__members__
        return tuple(name.lower() for name in names if name.startswith("SM"))

    def choose_capabilities(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """Names as `capabilities` gives them, each once, from `8.6`, `86` or `sm86`.

        Raises:
            SpotDeployError: one is unknown, none is given where engines are built ahead of time, or some are where they
                are built for the GPU that is present (exit code 2).
        """
        known = self.capabilities()
        if wanted and not self.ahead_of_time:
            raise usage_error(
                "capability",
                f"{self.name} builds for the GPU that is present, not for named compute capabilities",
                seen=", ".join(wanted),
                fix="leave them out, or choose --backend tensorrt-rtx",
            )
        names = ["sm" + text.strip().lower().removeprefix("sm").removeprefix("_").replace(".", "") for text in wanted]
        unknown = [text for text, name in zip(wanted, names, strict=True) if name not in known]
        if unknown or (self.ahead_of_time and not names):
            raise usage_error(
                "capability",
                f"{self.name} cannot build for {', '.join(unknown) or 'GPUs that nobody names'}",
                wanted=", ".join(known),
                fix="choose the compute capabilities of your GPUs among them; 8.6 is sm86",
            )
        return tuple(name for name in known if name in names)

    def choose_portability(self, portable: Sequence[str]) -> None:
        """Check that engines can be made portable in these ways.

        Raises:
            SpotDeployError: they cannot, or two exclude each other (exit code 2).
        """
        if portable and self.ahead_of_time:
            raise usage_error(
                "portable",
                f"{self.name} has no portable engines of this kind",
                seen=", ".join(portable),
                wanted="one engine for several GPUs is what --target is for; it is for one version of the package",
                fix="name all compute capabilities with --target",
            )
        if len(set(portable) & set(_HARDWARE)) > 1:
            raise usage_error(
                "portable",
                f"{' and '.join(_HARDWARE)} exclude each other",
                fix="choose same-sm for GPUs of one compute capability, ampere-plus for all from sm80 on",
            )

    def compile(
        self,
        *,
        target: tuple[str, Path, GraphSignature],
        order: tuple[Path, GraphSignature] | None,
        shape: TargetShape,
        limits: Limits,
        folder: Path,
        **options: Any,
    ) -> dict[str, Any]:
        """`build` of a bundle's graphs: role, file and signature of the target; the order model's, if there is one."""
        jobs = [target_job(*target, shape, limits)]
        if order is not None:
            jobs.append(order_job(*order, limits))
        return self.build(jobs, folder, **options)

    def build(
        self,
        jobs: Sequence[BuildJob],
        folder: Path,
        *,
        capabilities: Sequence[str] = (),
        portable: Sequence[str] = (),
        strip: bool = False,
        timing_caches: Path | None = None,
        say: Callable[[str], None] = lambda _: None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> dict[str, Any]:
        """Build an engine of every graph, `ROLE.engine` in `folder`: all of them, or none is written.

        Args:
            jobs: see `target_job` and `order_job`.
            capabilities: see `choose_capabilities`; one engine holds all of them.
            portable: see `backends.PORTABLE`.
            strip: leave weights out; they are read from the ONNX file when the engine is opened.
            timing_caches: a folder of files that keep what was measured while building, one per version and
                capabilities; made if missing. A file that is damaged or of something else is replaced, which `warn` is
                told. (TensorRT for RTX measures nothing while building, so there they stay empty.)
            say: told what is being done.

        Returns:
            Facts for a record: package, versions, capabilities, flags, timing cache, and by role the ONNX file and
            digest, inputs and outputs as the network reports them, profiles, layers by type and outputs by dtype of the
            parsed network, engine file, digest, bytes and seconds.

        Raises:
            SpotDeployError: package or driver missing (exit code 4), an unknown capability (2), a graph that the parser
                or the builder refuses, or that is not the one the signature describes (1). The error quotes TensorRT.
        """
        trt = self._import()
        self.choose_portability(portable)
        settings = Settings(self.choose_capabilities(capabilities), tuple(portable), strip)
        chosen = settings.capabilities
        if not self.ahead_of_time:
            self._require_driver("build")
        gpu = () if self.ahead_of_time else tuple(cuda.versions().values())  # what is measured depends on it
        key = " ".join((self.name, str(trt.__version__), *chosen, *gpu))
        cache = _TimingCache(timing_caches, key, warn)
        facts: dict[str, Any] = {"package": self.name, "versions": self.versions(), "capabilities": list(chosen)}
        graphs: dict[str, Any] = {}
        with contextlib.ExitStack() as engines:
            for job in jobs:
                say(f"building {job.role} for {', '.join(chosen) or 'this GPU'}, {len(job.profiles)} profiles")
                path = engines.enter_context(atomic_path(folder / f"{job.role}.engine"))
                graphs[job.role] = _Build(trt, self.name, job).run(path, settings, cache)
        facts["timing_cache"] = cache.facts()
        return facts | {"graphs": graphs}

    def Target(  # noqa: N802 - what the other backend modules have as a class
        self, path: Path, signature: GraphSignature, threads: int, precision: str, provider: str, compiled: Compiled
    ) -> trt_run.Target:
        """A target engine, opened.

        Raises:
            SpotDeployError: driver or package missing, too little GPU memory (exit code 4), another file than was
                built, weights that do not fit, or TensorRT refuses the engine.
        """
        return trt_run.Target(self._open(path, signature, compiled), signature)

    def OrderModel(  # noqa: N802
        self, path: Path, signature: GraphSignature, threads: int, precision: str, provider: str, compiled: Compiled
    ) -> trt_run.OrderModel:
        """An order model engine; as `Target`."""
        return trt_run.OrderModel(self._open(path, signature, compiled), signature)

    def layers(self, session: trt_run.Target | trt_run.OrderModel) -> list[Layer]:
        """The layers of an open engine, as TensorRT's inspector gives them."""
        return session.engine.layers()

    def compiled_kernels(self, session: trt_run.Target | trt_run.OrderModel) -> memoryview | None:
        """What TensorRT for RTX compiled for this GPU while an engine ran; TensorRT has none."""
        return session.engine.compiled_kernels()

    def _open(self, path: Path, signature: GraphSignature, compiled: Compiled) -> trt_run.Engine:
        self._require_driver("run")
        files = [path]
        if compiled.weights is not None and signature.past_names:  # the order model's graph holds its own
            files.append(compiled.weights.with_name("weights.safetensors"))
        cuda.require_memory(*files, buffers=compiled.buffers)
        trt = self._import()
        log: deque[str] = deque(maxlen=_LOG_LINES)
        return trt_run.Engine(trt, self.name, path, signature, _logger(trt, log), log, compiled)

    def _require_driver(self, verb: str) -> None:
        missing = cuda.missing_driver()
        if missing is not None:
            raise SpotDeployError(
                "driver-missing",
                f"{self.name} cannot {verb} here: {missing}",
                fix="use a machine with an NVIDIA GPU, or --backend onnxruntime or openvino",
                exit_code=ENVIRONMENT,
            )


class _Build:
    """Building one engine: every step that TensorRT can refuse is checked, with its own words in the error."""

    def __init__(self, trt: Any, package: str, job: BuildJob) -> None:
        self.trt, self.package, self.job = trt, package, job
        self.log: deque[str] = deque(maxlen=_LOG_LINES)
        self.logger = _logger(trt, self.log)

    def run(self, path: Path, settings: Settings, cache: _TimingCache) -> dict[str, Any]:
        """Parse, check, build, write to `path`; returns the facts of this graph."""
        trt, job, start = self.trt, self.job, time.monotonic()
        builder = self.made("a builder", lambda: trt.Builder(self.logger))
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = self.made("a network", lambda: builder.create_network(flags))
        self.parse(network)
        self.check_interface(network)
        config = self.made("a builder configuration", builder.create_builder_config)
        config.clear_flag(trt.BuilderFlag.TF32)  # on by default: a float32 engine would multiply with 10 bits
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # names and dtypes of layers, for the inspector
        self.set_flags(config, settings)
        if settings.capabilities:
            config.num_compute_capabilities = len(settings.capabilities)
        for index, name in enumerate(settings.capabilities):
            self.agreed(
                f"capability {name}", config.set_compute_capability(getattr(trt.ComputeCapability, name.upper()), index)
            )
        for name, shapes in job.profiles.items():
            self.add_profile(builder, network, config, name, shapes)
        cache.attach(config)
        plan = self.made("an engine", lambda: builder.build_serialized_network(network, config))
        cache.collect(config)
        path.write_bytes(memoryview(plan))
        return {
            "onnx": job.path.name,
            "onnx_sha256": sha256(job.path),
            "inputs": [_describe(network.get_input(i)) for i in range(network.num_inputs)],
            "outputs": [_describe(network.get_output(i)) for i in range(network.num_outputs)],
            "profiles": {
                name: {tensor: [list(shape) for shape in three] for tensor, three in shapes.items()}
                for name, shapes in job.profiles.items()
            },
            "buffers": buffer_bytes(job.signature, job.largest),
            **_histograms(network),
            "flags": [name for name, flag in trt.BuilderFlag.__members__.items() if config.get_flag(flag)],
            "engine": f"{job.role}.engine",
            "sha256": sha256(path),
            "bytes": path.stat().st_size,
            "seconds": round(time.monotonic() - start, 2),
        }

    def set_flags(self, config: Any, settings: Settings) -> None:
        """Set what was asked for, and see that TensorRT took it: it refuses flags by a line in its log alone.

        DISTRIBUTIVE_INDEPENDENCE is what the layout `split` would want; engines with several profiles cannot have it.
        """
        flags = self.trt.BuilderFlag
        wanted = {"VERSION_COMPATIBLE": "version" in settings.portable}
        # The weights that come back are those that were left out, and some versions drop biases under plain REFIT.
        wanted |= dict.fromkeys(("STRIP_PLAN", "REFIT_IDENTICAL"), settings.strip)
        # TensorRT for RTX: without it passes may allocate memory, and cannot be recorded as CUDA graphs.
        wanted["REQUIRE_USER_ALLOCATION"] = bool(settings.capabilities)
        for name in (name for name, on in wanted.items() if on):
            flag = getattr(flags, name)
            config.set_flag(flag)
            self.agreed(f"the flag {name}", bool(config.get_flag(flag)))
        for way in (way for way in settings.portable if way in _HARDWARE):
            level = getattr(self.trt.HardwareCompatibilityLevel, _HARDWARE[way])
            config.hardware_compatibility_level = level
            self.agreed(f"the compatibility {way}", config.hardware_compatibility_level == level)

    def made(self, what: str, make: Callable[[], Any]) -> Any:
        """What `make` gives, or an error: TensorRT returns None or raises."""
        what = f"{self.package} did not give {what} for {self.job.role}"
        try:
            result = make()
        except (RuntimeError, TypeError, ValueError) as error:
            raise self.failed(what, str(error), *self.log) from error
        if result is None:
            raise self.failed(what)
        return result

    def agreed(self, what: str, answer: bool | int) -> None:
        """An error where TensorRT answered False or a negative index."""
        if answer is False or answer < 0:
            raise self.failed(f"{self.package} refuses {what} for {self.job.role}")

    def failed(self, what: str, *said: str) -> SpotDeployError:
        """An error with what was said already, else the end of TensorRT's log."""
        lines = [" ".join(line.split()) for line in said or self.log]
        return SpotDeployError(
            "engine-build",
            what,
            seen=" | ".join(lines) or "nothing in its log",
            fix="leave out the compute capability or shapes that it names; else report this with your versions",
        )

    def parse(self, network: Any) -> None:
        """Read the ONNX file by its path, so that it finds its weights."""
        parser = self.made("a parser", lambda: self.trt.OnnxParser(network, self.logger))
        if parser.parse_from_file(str(self.job.path)):
            return
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        said = [f"node {e.node_name() or e.node()} ({e.node_operator()}): {e.desc()}" for e in errors if e is not None]
        raise self.failed(f"{self.package} cannot read {self.job.path.name}", *said)

    def check_interface(self, network: Any) -> None:
        """Compare names, dtypes and dynamic axes with the signature."""
        inputs = [_describe(network.get_input(i)) for i in range(network.num_inputs)]
        outputs = [_describe(network.get_output(i)) for i in range(network.num_outputs)]
        seen = [(t["name"], t["dtype"], tuple(d if d >= 0 else "?" for d in t["shape"])) for t in (*inputs, *outputs)]
        self.job.signature.require(seen, self.job.role)
        for spec, tensor in zip(self.job.signature.inputs, inputs, strict=True):
            if [d if isinstance(d, int) else -1 for d in spec.shape] != tensor["shape"]:
                raise self.failed(f"{spec.name} of {self.job.role} is {tensor['shape']}, not {list(spec.shape)}")

    def add_profile(self, builder: Any, network: Any, config: Any, name: str, shapes: Shapes) -> None:
        profile = self.made("a profile", builder.create_optimization_profile)
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            try:
                profile.set_shape(tensor.name, *shapes[tensor.name])
            except (RuntimeError, TypeError, ValueError) as error:
                what = f"{self.package} refuses profile {name} for {self.job.role}"
                raise self.failed(what, str(error), *self.log) from error
        self.agreed(f"profile {name}", config.add_optimization_profile(profile))


def _logger(trt: Any, lines: deque[str]) -> Any:
    """A TensorRT logger that keeps its last errors in `lines`, but for the complaint that there is no driver."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            expected = _NO_DRIVER in message and cuda.missing_driver() is not None
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR) and not expected:
                lines.append(message)

    return Logger()


def _describe(tensor: Any) -> dict[str, Any]:
    """Name, dtype and shape of a network tensor; -1 for free dimensions."""
    return {"name": tensor.name, "dtype": _dtype(tensor), "shape": [int(d) for d in tensor.shape]}


def _dtype(tensor: Any) -> str:
    name = str(tensor.dtype.name)
    return trt_run.DTYPES.get(name, name.lower())


def _histograms(network: Any) -> dict[str, dict[str, int]]:
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    types = Counter(layer.type.name for layer in layers)
    dtypes = Counter(_dtype(layer.get_output(i)) for layer in layers for i in range(layer.num_outputs))
    return {"layers": dict(sorted(types.items())), "dtypes": dict(sorted(dtypes.items()))}


class _TimingCache:
    """TensorRT's timing cache in a file that several builds may share.

    The file is named by a digest of its key (package, version, capabilities). It is a line with the key and a digest,
    then TensorRT's bytes: TensorRT itself takes damaged ones without a word.
    """

    def __init__(self, folder: Path | None, key: str, warn: Callable[[str], None]) -> None:
        self._key, self._warn = key.encode(), warn
        self._path: Path | None = None
        self._data, self._state = b"", "none"
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            warn(f"there will be no timing cache: {error}")
            folder = None
        if folder is not None:
            self._path = folder / f"timing-{_digest(self._key)[:12].decode()}.cache"
            self._data, self._state = self._read(self._path)
        if self._state in ("damaged", "foreign"):
            warn(f"the timing cache {self._path} is {self._state} and is started anew")

    def facts(self) -> dict[str, Any]:
        """What was found in the file (`none`, `new`, `reused`, `damaged`, `foreign`), and how large it is now."""
        return {"state": self._state, "bytes": len(self._data)}

    def _read(self, path: Path) -> tuple[bytes, str]:
        try:
            head, _, data = path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return b"", "new"
        except OSError:
            return b"", "damaged"
        form, _, rest = head.partition(b": ")
        key, _, digest = rest.rpartition(b" ")
        if form != _CACHE_FORMAT or digest != _digest(data):
            return b"", "damaged"
        return (data, "reused") if key == self._key else (b"", "foreign")

    def attach(self, config: Any) -> None:
        """Give what is known to a build."""
        if self._path is None:
            return
        with _deprecated():
            cache = config.create_timing_cache(self._data)
            if cache is None or config.set_timing_cache(cache, False) is False:
                self._warn(f"TensorRT refuses the timing cache {self._path}; it is started anew")
                self._data, self._state = b"", "foreign"
                config.set_timing_cache(config.create_timing_cache(b""), False)

    def collect(self, config: Any) -> None:
        """Merge what a build has learnt with what others wrote meanwhile, and write it."""
        try:
            self._merge(config)
        except OSError as error:
            self._warn(f"the timing cache cannot be written: {error}")

    def _merge(self, config: Any) -> None:
        if self._path is None:
            return
        with _deprecated(), _locked(self._path):
            cache = config.get_timing_cache()
            others, state = self._read(self._path)
            if cache is not None and state == "reused" and others != self._data:
                theirs = config.create_timing_cache(others)
                if theirs is not None:
                    cache.combine(theirs, False)
            plan = None if cache is None else cache.serialize()
            if plan is None:
                self._warn(f"TensorRT gives no timing cache; {self._path} stays as it is")
                return
            self._data = bytes(memoryview(plan))
            with atomic_path(self._path) as temporary:
                head = _CACHE_FORMAT + b": " + self._key + b" " + _digest(self._data)
                temporary.write_bytes(head + b"\n" + self._data)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


@contextlib.contextmanager
def _deprecated() -> Iterator[None]:
    """TensorRT for RTX calls its timing cache deprecated; TensorRT has use for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes out while a shared file is read and replaced (a lock file beside it, as it is replaced)."""
    import fcntl

    with path.with_name(path.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


RTX = TensorRT("tensorrt_rtx")
FULL = TensorRT("tensorrt")
