"""Work in a process of its own, which gives all memory back and can be ended at any moment.

A line of JSON goes in (module, function, arguments); lines of JSON come out (progress, then the result or an error).
The child's own standard output is sent to standard error, since native libraries print. It ends with its parent: the
pipe from the parent closes even if that was killed.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from spot_deploy.engines.errors import FAILURE, SpotDeployError

DEBUG = "SPOT_DEPLOY_DEBUG"  # set by --debug: the child then shows the traceback of a bug


def run_in_child(function: str, arguments: dict[str, Any], say: Callable[[str], None]) -> None:
    """Call `function` ("module:name") with keyword arguments and `say`, in a new process.

    Raises:
        SpotDeployError: the one that the function raised; or the process was killed, as by the system when memory
            runs out.
        KeyboardInterrupt: while it ran; the process is gone then.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "spot_deploy.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # Ctrl-C goes to the parent alone, which ends the child
    )
    assert process.stdin is not None
    assert process.stdout is not None
    error: dict[str, Any] | None = None
    done = False
    try:
        process.stdin.write(json.dumps({"function": function, "arguments": arguments}) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            message = json.loads(line)
            if "say" in message:
                say(message["say"])
            error = message.get("error", error)
            done = done or message.get("done", False)
        code = process.wait()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdin.close()
        process.stdout.close()
    if error is not None:
        raise SpotDeployError(
            error["code"], error["what"], seen=error["seen"], wanted=error["wanted"], fix=error["fix"],
            exit_code=error["exit_code"],
        )  # fmt: skip
    if not done:
        raise SpotDeployError(
            "build-killed",
            "the building process ended before it was done",
            seen=f"killed by signal {-code}" if code < 0 else f"exit code {code}",
            fix="if it was signal 9, memory has probably run out: free some, or choose smaller --budgets"
            if code == -signal.SIGKILL
            else "read its messages above, and report them",
            exit_code=FAILURE,
        )


def main() -> None:
    """The child's side."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    line = sys.stdin.readline()
    if not line.endswith("\n"):
        return  # the parent has gone already
    task = json.loads(line)

    def end_with_parent() -> None:
        sys.stdin.read()  # returns when the parent has gone
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    module, name = task["function"].split(":")
    try:
        getattr(importlib.import_module(module), name)(**task["arguments"], say=lambda text: send({"say": text}))
        send({"done": True})
    except SpotDeployError as error:
        send({"error": error.as_dict() | {"exit_code": error.exit_code}})
    except OSError as error:
        what = f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
        fix = "check that path, its permissions and the free disk space"
        send({"error": SpotDeployError("os-error", what, fix=fix).as_dict() | {"exit_code": FAILURE}})
    except Exception as error:
        if os.environ.get(DEBUG):
            traceback.print_exc()
        what = f"this is a bug in spot-deploy: {type(error).__name__}: {error}"
        fix = "run again with --debug before the verb, and report the traceback"
        send({"error": SpotDeployError("bug", what, fix=fix).as_dict() | {"exit_code": FAILURE}})
    os._exit(0)  # native libraries may wait for their threads at an ordinary exit


if __name__ == "__main__":
    main()
