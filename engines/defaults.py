"""Drafting defaults of one engine on one machine, as `calibrate` measured them: `engines/BACKEND/calibration.json`.

They lie in the engine's folder, so a new engine begins without them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.engines.files import read_json, write_json
from spot_deploy.engines.record import engine_folder

CALIBRATION = "calibration.json"
FORMAT, SCHEMA_VERSION = "spot-deploy-calibration", 1


@dataclass(frozen=True)
class Defaults:
    """What drafts of this engine are made with unless told otherwise (see runtime.decode.DecodeOptions)."""

    budget: int
    gamma: float
    tau: float
    hedge_gate: float

    def __post_init__(self) -> None:
        numbers = (self.gamma, self.tau, self.hedge_gate)
        right = type(self.budget) is int and self.budget >= 0 and all(type(n) in (int, float) for n in numbers)
        if not right or self.gamma < 0 or self.tau <= 0 or not 0 <= self.hedge_gate <= 1:
            raise ValueError(f"no such defaults: {self}")


def write_defaults(bundle: Path, backend: str, defaults: Defaults, evidence: dict[str, Any]) -> Path:
    """Write the defaults with what they were chosen by."""
    path = engine_folder(bundle, backend) / CALIBRATION
    write_json(path, {"format": FORMAT, "schema_version": SCHEMA_VERSION, **asdict(defaults), "evidence": evidence})
    return path


def read_defaults(bundle: Path, backend: str) -> Defaults | None:
    """An engine's defaults; None where nobody calibrated it.

    Raises:
        SpotDeployError: the file is damaged.
    """
    path = engine_folder(bundle, backend) / CALIBRATION
    if not path.is_file():
        return None
    fix = f"delete {path}, or calibrate again"
    document = read_json(path, code="calibration", fix=fix)
    try:
        if (document["format"], document["schema_version"]) != (FORMAT, SCHEMA_VERSION):
            raise ValueError(f"format {document['format']!r}, schema {document['schema_version']!r}")
        return Defaults(**{field.name: document[field.name] for field in fields(Defaults)})
    except (KeyError, TypeError, ValueError) as error:
        raise SpotDeployError("calibration", f"cannot use {path}", seen=repr(error)[:200], fix=fix) from error
