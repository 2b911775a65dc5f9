"""The one exception type for what a user can mend, and the exit codes.

0 ok; 1 failure; 2 usage; 3 parity or verification failed; 4 this environment cannot run it; 130 interrupted.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

FAILURE, USAGE, VERIFICATION, ENVIRONMENT, INTERRUPTED = 1, 2, 3, 4, 130


class SpotDeployError(Exception):
    """An error that a user can act on.

    Attributes:
        code: short stable identifier, such as `bundle-file-changed`.
        what: one sentence: what went wrong.
        seen: what was found, or "".
        wanted: what was expected, or "".
        fix: what to do about it.
        exit_code: the process exit code of the command line.
    """

    def __init__(
        self, code: str, what: str, *, seen: str = "", wanted: str = "", fix: str, exit_code: int = FAILURE
    ) -> None:
        super().__init__(what)
        self.code, self.what, self.seen, self.wanted, self.fix = code, what, seen, wanted, fix
        self.exit_code = exit_code

    def __str__(self) -> str:
        lines = [f"{self.what} [{self.code}]"]
        lines += [f"  {name}: {text}" for name, text in self._details() if text]
        return "\n".join(lines)

    def _details(self) -> list[tuple[str, str]]:
        return [("seen", self.seen), ("wanted", self.wanted), ("fix", self.fix)]

    def as_dict(self) -> dict[str, str]:
        """For `--json`."""
        return {"code": self.code, "what": self.what} | dict(self._details())


def backend_missing(backend: str, extra: str, seen: str) -> SpotDeployError:
    """A backend's package cannot be imported: it is not there, or lacks libraries that it loads (exit code 4)."""
    return SpotDeployError(
        "backend-missing",
        f"the backend {backend} is not installed, or not whole",
        seen=seen,
        fix=f'pip install "spot-deploy[{extra}]"',
        exit_code=ENVIRONMENT,
    )


def refuse_clash(name: str, packages: Iterable[str]) -> None:
    """Raise (exit code 4) if several of these packages are installed, which all write the same files."""
    there = {(d.metadata["Name"] or "").lower().replace("_", "-") for d in importlib.metadata.distributions()}
    clash = sorted(there & set(packages))
    if len(clash) > 1:
        raise SpotDeployError(
            "backend-clash",
            f"several {name} packages are installed and overwrite each other's files",
            seen=", ".join(clash),
            wanted="one of them",
            fix=f"pip uninstall {' '.join(clash)}, then install the one you want",
            exit_code=ENVIRONMENT,
        )


def usage_error(code: str, what: str, *, seen: str = "", wanted: str = "", fix: str) -> SpotDeployError:
    """An error in what the user asked for (exit code 2)."""
    return SpotDeployError(code, what, seen=seen, wanted=wanted, fix=fix, exit_code=USAGE)
