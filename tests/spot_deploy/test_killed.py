"""kill -9 at random moments of export and build-engine: what is there then loads right or is not there.

SPOT_DEPLOY_KILLS sets how many moments are tried (6 in the ordinary run; 30 take a few minutes more).
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import pytest

from spot_deploy import Runtime, SpotDeployError
from spot_deploy.diagnosis import diagnose
from spot_deploy.engines.files import STAGING
from spot_deploy.runtime.bundle import open_bundle

KILLS = int(os.environ.get("SPOT_DEPLOY_KILLS", "6"))


def run(*arguments, after=None):
    """Run the command line to its end, or kill it `after` seconds; returns the exit code (None: killed) and seconds."""
    command = [sys.executable, "-P", "-c", "from spot_deploy.cli.main import main; main()", *map(str, arguments)]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        code = process.wait(after)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        code = None
    return code, time.monotonic() - began


def tokens(bundle):
    with Runtime.load(bundle) as runtime:
        return runtime.generate("the cat", max_new_tokens=16, ignore_eos=True, budget=3).token_ids


@pytest.mark.parametrize("verb", ["export", "build-engine"])
def test_killed_at_any_moment(verb, tiny_bundle, tiny_checkpoint, random_order_model, tmp_path):
    rng = random.Random(verb)
    wanted = tokens(tiny_bundle)
    output = tmp_path / "out.spot"
    export = ("export", tiny_checkpoint, "--order-model", random_order_model, "-o", output, "--budgets", "0,3,8")
    export = (*export, "--budget", 3, "--parity", "none", "--force")
    build = ("build-engine", output, "--precision", "f32", "--threads", 1, "--force")
    code, whole = run(*export)
    assert code == 0
    if verb == "build-engine":
        code, whole = run(*build)
        assert code == 0
    killed = 0
    for _ in range(max(1, KILLS // 2)):
        code, _ = run(*(export if verb == "export" else build), after=rng.uniform(0, whole))
        killed += code is None
        assert open_bundle(output).manifest.speculation.budgets == (0, 3, 8)  # the old one or the new one, whole
        try:
            assert tokens(output) == wanted
        except SpotDeployError as error:
            if error.code != "engine-missing":  # a bundle that was just exported has none
                raise
    assert killed
    assert run(*export)[0] == 0
    assert run(*build)[0] == 0
    assert tokens(output) == wanted
    left = [*tmp_path.glob(f"{STAGING}*"), *(output / "engines").glob(f"{STAGING}*")]
    report = diagnose([output], clean=True)
    assert {str(path) for path in left} <= {entry["path"] for entry in report["leftovers"]}
    assert report["bundles"][0]["faults"] == []
    assert not [*tmp_path.glob(f"{STAGING}*"), *(output / "engines").glob(f"{STAGING}*")]
    assert tokens(output) == wanted
