"""Imports go one way: engines <- runtime <- export <- spot_deploy, and heavy packages have one owner."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {
    "engines": {"spot_deploy.engines"},
    "runtime": {"spot_deploy.engines", "spot_deploy.runtime"},
    "export": {"spot_deploy.engines", "spot_deploy.runtime", "spot_deploy.export", "spot_deploy.__version__"},
}
OWNERS = {
    "onnxruntime": {"engines/ort.py"},
    "openvino": {"engines/ov.py"},
    "cuda": {"engines/cuda.py"},
    "tensorrt": {"engines/trt.py"},
    "tensorrt_rtx": {"engines/trt.py"},
    "transformers": {
        *(p.relative_to(ROOT).as_posix() for p in (ROOT / "export" / "families").glob("*.py")),
        "export/bundle_writer.py",
        "export/parity.py",
    },
    "tokenizers": {"runtime/text.py"},
    "jinja2": {"runtime/text.py", "export/bundle_writer.py", "spot_deploy/bench/page.py"},
    "matplotlib": {"spot_deploy/bench/figures.py", "spot_deploy/bench/page.py"},
    "onnx_ir": {f"export/{name}.py" for name in ("trace", "layers", "summary", "quantize", "weights")},
}
FILES = [p for room in (*ROOMS, "spot_deploy") for p in sorted((ROOT / room).rglob("*.py"))]


def imports(path):
    """Every module name that a file imports, at any depth; `from a import b` counts as a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_follow_the_table(path):
    relative = path.relative_to(ROOT).as_posix()
    room = relative.split("/")[0]
    for name in imports(path):
        top = name.split(".")[0]
        assert top not in ROOMS, f"{relative} imports the room {top} by its folder name"
        if top == "spot_deploy" and room in ROOMS:
            assert any(name == allowed or name.startswith(allowed + ".") for allowed in ROOMS[room]), name
        if top in OWNERS:
            assert relative in OWNERS[top], f"{relative} imports {top}"
        if top in ("torch", "safetensors"):
            assert room == "export" or relative.startswith("spot_deploy/training/"), relative
        if room == "engines":
            third_party = {"numpy", "onnxruntime", "openvino", "cuda"} & {top} or top in ("spot_deploy", "__future__")
            assert third_party or top in __import__("sys").stdlib_module_names, f"{relative} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_owned_package_is_imported_by_a_name_in_a_string(path):
    """engines/trt.py imports what it is given, so that one piece of code serves two packages; nothing else may."""
    calls = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
    names = [ast.unparse(n.args[0]) for n in calls if ast.unparse(n.func).endswith("import_module")]
    relative = path.relative_to(ROOT).as_posix()
    assert (
        all(name == "self._package" for name in names)
        if relative == "engines/trt.py"
        else not {owned for owned in OWNERS for name in names if owned in name}
    )


def test_no_package_files_under_tests():
    assert not list((ROOT / "tests").rglob("__init__.py"))
