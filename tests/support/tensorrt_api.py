"""What TensorRT's Python bindings offer, told without its libraries, which are not on PyPI.

The bindings wheel is real, and importing it runs nothing of TensorRT; it only wants its libraries to be there with the
few functions that it calls. TensorRT for RTX has all of these but one, so its libraries stand in under their names.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# Our libraries lack the first; nothing here calls either.
LACKING, INSTEAD = b"\0initLibNvInferPlugins\0", b"\0getPluginRegistry\0"


def bindings(version: int) -> dict[str, dict[str, str]]:
    """Class to attribute to docstring, of TensorRT 10 or 11; enumerations have their members as attributes."""
    folder = Path(sys.prefix) / "bindings" / str(version)
    assert folder.is_dir(), f"{folder} is missing: scripts/test installs it"
    (library,) = folder.glob("tensorrt_bindings/tensorrt.so")
    rtx = Path(next(iter(importlib.util.find_spec("tensorrt_rtx_libs").submodule_search_locations)))
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        text = library.read_bytes()
        assert LACKING in text
        (work / "tensorrt.so").write_bytes(text.replace(LACKING, INSTEAD.ljust(len(LACKING), b"\0")))
        for library_name in ("nvinfer", "nvinfer_plugin"):
            (work / f"lib{library_name}.so.{version}").symlink_to(next(rtx.glob("libtensorrt_rtx.so*")))
        (work / f"libnvonnxparser.so.{version}").symlink_to(next(rtx.glob("libtensorrt_onnxparser_rtx.so*")))
        environment = os.environ | {"LD_LIBRARY_PATH": f"{work}:{rtx}"}
        command = [sys.executable, __file__, str(work / "tensorrt.so")]
        return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def describe(module: object) -> dict[str, dict[str, str]]:
    """The public attributes of every class of a module."""
    classes = {name: kind for name, kind in vars(module).items() if isinstance(kind, type)}
    return {
        name: {a: str(getattr(kind, a).__doc__ or "") for a in dir(kind) if not a.startswith("_") or a == "__init__"}
        for name, kind in classes.items()
    }


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("tensorrt", sys.argv[1])
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    print(json.dumps(describe(loaded)))
