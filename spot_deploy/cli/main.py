"""`spot-deploy`: verbs are imported only when they run; errors are plain lines; exit codes as in engines.errors."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, NoReturn

import click

from spot_deploy.engines.errors import FAILURE, INTERRUPTED, USAGE, SpotDeployError

VERBS = {
    "export": "Checkpoint and order model to a bundle.",
    "build-engine": "Make a bundle's engine for a backend and this machine.",
    "run": "Decode a prompt.",
    "bench": "Measure drafters side by side, from a configuration file.",
    "report": "Tables, figures and a page of what bench measured.",
    "calibrate": "Find the budget and mass floor that are fastest on this machine.",
    "verify": "Prove an engine again: parity, isolation, joining, speculative equality.",
    "inspect": "Show what a bundle holds.",
    "doctor": "Say what this machine can run and why not the rest; find leftovers.",
    "record": "Record draft-free trajectories of a target, to train an order model on.",
    "train-drafter": "Train an order model on recorded trajectories.",
    "eval-drafter": "Measure an order model: accuracy, coverage, passes against oracles.",
    "drafter": "Take an order model that was made elsewhere (drafter import).",
}


class LazyGroup(click.Group):
    """Knows the verbs' names and one-line helps without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        module = importlib.import_module(f"spot_deploy.cli.{name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="spot-deploy")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Run diffusion language models fast and losslessly.

    export a checkpoint to a bundle, build-engine for a backend, run a prompt.
    """
    if debug:
        os.environ["SPOT_DEPLOY_DEBUG"] = "1"


def main(arguments: list[str] | None = None) -> Any:
    """Entry point of the console script."""
    given = sys.argv[1:] if arguments is None else arguments
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):  # clean up as after Ctrl-C; but nohup is to be heeded, and Windows has none
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, _terminate)
    try:
        code = cli.main(given, prog_name="spot-deploy", standalone_mode=False)
        sys.stdout.flush()
    except SpotDeployError as error:
        if "--debug" in given:
            raise
        click.echo(f"Error: {error}", err=True)
        _leave(given, error.exit_code, error.as_dict())
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        _leave(given, INTERRUPTED, {"code": "interrupted", "what": "interrupted"})
    except click.ClickException as error:
        error.show()
        code = USAGE if isinstance(error, click.UsageError) else error.exit_code
        _leave(given, code, {"code": "usage", "what": error.format_message()})
    except BrokenPipeError:
        _leave([], FAILURE, {})  # the reader of our output went away
    except OSError as error:
        if "--debug" in given:
            raise
        what = f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
        click.echo(
            f"Error: {what} [os-error]\n  fix: check that path, its permissions and the free disk space", err=True
        )
        _leave(given, FAILURE, {"code": "os-error", "what": what})
    except Exception as error:
        if "--debug" in given:
            raise
        what = f"this is a bug in spot-deploy: {type(error).__name__}: {error}"
        click.echo(f"Error: {what}\n  fix: run again with --debug before the verb, and report the traceback", err=True)
        _leave(given, FAILURE, {"code": "bug", "what": what})
    sys.exit(code if isinstance(code, int) else 0)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _leave(arguments: list[str], code: int, error: dict[str, str]) -> NoReturn:
    """Exit; with --json, the error is one object on stdout as well."""
    try:
        if "--json" in arguments:
            click.echo(json.dumps({"error": error}))
        sys.stdout.flush()
    except OSError:
        # Standard output is gone or full, which may be the error itself; do not fail again at shutdown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
