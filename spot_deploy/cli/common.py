"""What several verbs share: option types, output, progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spot_deploy.engines.backends import BACKENDS
from spot_deploy.engines.errors import usage_error
from spot_deploy.runtime.manifest import MAX_BUDGET

if TYPE_CHECKING:
    from rich.console import Console

MAX_THREADS = 1024

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
backend_option = click.option(
    "--backend", type=click.Choice(BACKENDS), default=BACKENDS[0], show_default=True, help="Which engine runs."
)
threads_option = click.option(
    "--threads", type=click.IntRange(1, MAX_THREADS), help="In place of the engine's; drafts are then not called exact."
)
prompts_option = click.option(
    "--prompts", type=click.Path(path_type=Path), required=True, help='JSON lines {"prompt": ..., "kind": ...}.'
)
limit_option = click.option("--limit", type=click.IntRange(1), help="Use the first prompts only.")
chat_option = click.option("--chat", is_flag=True, help="Put the prompts into the target's chat template.")
bundle_argument = click.argument("bundle", type=click.Path(path_type=Path))


class WholeNumbers(click.ParamType[tuple[int, ...]]):
    """Comma-separated whole numbers from 0 to `most`: draft budgets, or token ids."""

    name = "N,N,..."

    def __init__(self, most: int = MAX_BUDGET):
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
            if not all(0 <= number <= self.most for number in numbers):
                raise ValueError
        except ValueError:
            self.fail(f"{value!r} is no list of whole numbers within 0..{self.most}, such as 0,3,8", param, ctx)
        return numbers


class Numbers(click.ParamType[tuple[float, ...]]):
    """Comma-separated numbers."""

    name = "X,X,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of numbers such as 0,1", param, ctx)


class Words(click.ParamType[tuple[str, ...]]):
    """Comma-separated words."""

    name = "X,X,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(part.strip() for part in str(value).split(",")) if value else ()


def emit(document: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    click.echo(json.dumps(document, ensure_ascii=False))


def stderr_console() -> Console:
    """For everything human."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def spinner(text: str, *, only_terminal: bool = False) -> Iterator[Any]:
    """A spinner with the elapsed time on a terminal; elsewhere plain lines, or nothing.

    Yields a function that changes the text.
    """
    console = stderr_console()
    if not console.is_terminal:

        def line(new: str) -> None:
            if not only_terminal:
                console.print(f"{new} ...")

        line(text)
        yield line
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(text, total=None)
        yield lambda new: progress.update(task, description=new)


@contextmanager
def progress_bar(text: str, total: int) -> Iterator[Any]:
    """A progress bar on a terminal, a line every tenth elsewhere. Yields a function (done, note)."""
    console = stderr_console()
    if not console.is_terminal:
        last = [-1]

        def line(done: int, note: str = "") -> None:
            tenth = done * 10 // max(1, total)
            if tenth != last[0]:
                last[0] = tenth
                console.print(f"{text}: {done}/{total} {note}".rstrip())

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(text, total=total, note="")
        yield lambda done, note="": progress.update(task, completed=done, note=note)


def read_prompt(prompt: str) -> str:
    """A prompt given as text, or `-` for standard input, whose last line end is not part of the prompt.

    Raises:
        SpotDeployError: it is empty, or standard input is not UTF-8 (exit code 2).
    """
    if prompt == "-":
        if sys.stdin is None:
            raise usage_error("prompt-stdin", "standard input is closed", fix='pipe the prompt in, or --prompt "TEXT"')
        data = sys.stdin.buffer.read()
        try:
            prompt = data.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise usage_error(
                "prompt-encoding",
                "standard input is not UTF-8 text",
                seen=f"byte 0x{data[error.start]:02x} at offset {error.start}",
                wanted="UTF-8",
                fix="convert it, for example with iconv -t UTF-8",
            ) from error
    else:
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:  # undecodable bytes on the command line arrive as lone surrogates
            raise usage_error(
                "prompt-encoding", "the prompt is not UTF-8 text", seen=ascii(prompt[:40]), fix="give it in UTF-8"
            ) from error
    if not prompt:
        raise usage_error("prompt-empty", "the prompt is empty", wanted="some text", fix='--prompt "TEXT"')
    return prompt
