"""Bundles are exported once per test run: a tiny random target, and the demo target that ships."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

# Several threads beside another busy process can be many times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).parents[1]
BACKENDS = ("onnxruntime", "openvino")


def build(checkpoint, order_model, output, **options):
    from spot_deploy import build_engine
    from spot_deploy.export.bundle_writer import ExportOptions, export_bundle

    export_bundle(checkpoint, output, order_model=order_model, options=ExportOptions(**options))
    for backend in BACKENDS:
        build_engine(output, backend=backend, precision="f32", threads=1)
    return output


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    from tiny_checkpoint import write_tiny_checkpoint

    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-target")


@pytest.fixture(scope="session")
def random_order_model(tmp_path_factory):
    import torch

    from spot_deploy.export.order_model import OrderModel, save_order_model

    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("order") / "order-model"
    save_order_model(OrderModel(), folder, {"note": "random"})
    return folder


@pytest.fixture(scope="session")
def tiny_bundle(tiny_checkpoint, random_order_model, tmp_path_factory):
    """Width 8, random weights, random order model, all precisions, engine built. Read only: copy it to change it."""
    output = tmp_path_factory.mktemp("bundles") / "tiny.spot"
    return build(tiny_checkpoint, random_order_model, output, budgets=(0, 3, 8), budget=3, precisions=("f16", "bf16"))


@pytest.fixture(scope="session")
def quantised_bundle(tiny_checkpoint, random_order_model, tmp_path_factory):
    """The tiny target with int8 and int4 graphs beside the float32 ones; no engine built. Read only."""
    from spot_deploy.export.bundle_writer import ExportOptions, export_bundle

    output = tmp_path_factory.mktemp("bundles") / "quantised.spot"
    options = ExportOptions(budgets=(0, 3, 8), budget=3, parity="none", precisions=("int8", "int4"))
    export_bundle(tiny_checkpoint, output, order_model=random_order_model, options=options)
    return output


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory):
    """The demo target and order model, exported as the quick start does. Read only."""
    output = tmp_path_factory.mktemp("bundles") / "demo.spot"
    return build(ROOT / "demo" / "target", ROOT / "demo" / "order-model", output)


@pytest.fixture
def heeding_signals():
    """For `preexec_fn`: a child heeds Ctrl-C even where the tests were started in the background or by nohup."""

    def restore():
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    return restore


@pytest.fixture
def tiny_copy(tiny_bundle, tmp_path):
    """A bundle of one's own to damage."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "copy.spot"))


@pytest.fixture(scope="session")
def tiny_runtime(tiny_bundle):
    from spot_deploy import Runtime

    with Runtime.load(tiny_bundle) as runtime:
        yield runtime


@pytest.fixture(scope="session", params=BACKENDS)
def each_runtime(request, tiny_bundle):
    """The tiny bundle on every backend."""
    from spot_deploy import Runtime

    with Runtime.load(tiny_bundle, backend=request.param) as runtime:
        yield runtime


@pytest.fixture(scope="session")
def demo_runtime(demo_bundle):
    from spot_deploy import Runtime

    with Runtime.load(demo_bundle) as runtime:
        yield runtime
