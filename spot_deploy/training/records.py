"""Recorded draft-free trajectories: the order model's training data (SPOT, section 3.1).

A folder of shards (safetensors) and `records.json`. Per pass the stale summary that the order model reads (top-32
log-probabilities and ids, mass of the rest, log-odds of the top token) of every masked position, and the commit that
followed. A shard that is there is not recorded again, so recording goes on where it stopped.

| tensor | dtype, shape | meaning |
| --- | --- | --- |
| block_step | int64 [B + 1] | first pass of each block |
| given | bool [B, L] | positions that hold the prompt |
| temperature | float32 [B] | |
| step_row | int64 [S + 1] | first row of each pass; rows are its masked positions, rising |
| position, token | int32 [S] | the commit |
| log_p, ids | float16, int32 [N, 32] | |
| rest, log_odds | float32 [N] | |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spot_deploy.engines.contracts import Array
from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.engines.files import read_json
from spot_deploy.runtime.features import TOP, Stale
from spot_deploy.runtime.head import Head
from spot_deploy.runtime.state import Commit, State

FORMAT = "spot-deploy-records"
META = "records.json"
ROWS = ("log_p", "ids", "rest", "log_odds")
TENSORS = (*ROWS, "block_step", "given", "temperature", "step_row", "position", "token")
DEPTHS = (1, 2, 4, 8, 16)  # at which accuracy is reported; depth 1 follows the root


class Recorder:
    """Collects what a decode observes (see decode.Observer)."""

    def __init__(self, width: int):
        self._width = width
        self._columns: dict[str, list[Any]] = {
            name: [] for name in ("given", "temperature", "position", "token", "log_p", "ids", "rest", "log_odds")
        }
        self._block_step: list[int] = []
        self._rows = [0]
        self.temperature = 0.0

    def __call__(self, state: State, head: Head, commit: Commit) -> None:
        columns = self._columns
        if state.commits == 0:
            self._block_step.append(len(columns["position"]))
            columns["given"].append(state.tokens != state.mask_id)
            columns["temperature"].append(self.temperature)
        stale = Stale.of(head, self._width)
        count, known = stale.log_p.shape
        log_p = np.full((count, TOP), -60.0, np.float16)
        ids = np.full((count, TOP), -1, np.int32)
        log_p[:, :known] = np.maximum(stale.log_p, -60)
        ids[:, :known] = stale.ids
        columns["log_p"].append(log_p)
        columns["ids"].append(ids)
        columns["rest"].append(stale.rest.astype(np.float32))
        columns["log_odds"].append(stale.log_odds.astype(np.float32))
        columns["position"].append(commit.position)
        columns["token"].append(commit.token)
        self._rows.append(self._rows[-1] + count)

    def tensors(self) -> dict[str, Array]:
        """The table above."""
        columns = self._columns
        rows = {name: np.concatenate(columns[name]) for name in ROWS}
        return rows | {
            "block_step": np.array([*self._block_step, len(columns["position"])], np.int64),
            "given": np.stack(columns["given"]),
            "temperature": np.array(columns["temperature"], np.float32),
            "step_row": np.array(self._rows, np.int64),
            "position": np.array(columns["position"], np.int32),
            "token": np.array(columns["token"], np.int32),
        }


@dataclass(frozen=True)
class Records:
    """Trajectories in memory; arrays as in the table above."""

    width: int
    arrays: dict[str, Array]

    @property
    def blocks(self) -> int:
        return len(self.arrays["given"])

    def steps(self, block: int) -> range:
        """The passes of a block."""
        return range(int(self.arrays["block_step"][block]), int(self.arrays["block_step"][block + 1]))

    def commits(self, steps: Sequence[int]) -> list[Commit]:
        return [Commit(int(self.arrays["position"][s]), int(self.arrays["token"][s])) for s in steps]

    def stale(self, block: int, step: int) -> Stale:
        """The stale distributions after a pass of a block."""
        a = self.arrays
        masked = ~a["given"][block]
        masked[a["position"][self.steps(block).start : step]] = False
        rows = slice(int(a["step_row"][step]), int(a["step_row"][step + 1]))
        return Stale(
            self.width,
            np.flatnonzero(masked),
            a["log_p"][rows].astype(np.float64),
            a["ids"][rows],
            a["rest"][rows].astype(np.float64),
            a["log_odds"][rows].astype(np.float64),
        )


def load_records(folders: Sequence[Path]) -> Records:
    """Read and join the shards of one or more folders.

    Raises:
        SpotDeployError: a folder holds no records, or block widths differ.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    shards: list[dict[str, Array]] = []
    widths = set()
    for folder in folders:
        meta = read_json(folder / META, code="records", fix="give folders that spot-deploy record wrote")
        if not isinstance(meta, dict) or meta.get("format") != FORMAT or type(meta.get("block_width")) is not int:
            raise SpotDeployError("records", f"{folder} holds no records", fix="spot-deploy record makes them")
        widths.add(meta["block_width"])
        for path in sorted(folder.glob("shard-*.safetensors")):
            try:
                shard = load_file(path)
                shards.append({name: shard[name] for name in TENSORS})
            except (SafetensorError, KeyError, OSError) as error:
                raise SpotDeployError(
                    "records", f"cannot read {path}", seen=str(error), fix="delete it and record again"
                ) from error
    if not shards or len(widths) != 1:
        raise SpotDeployError(
            "records",
            "there is nothing to join",
            seen=f"{len(shards)} shards, block widths {sorted(widths)}",
            wanted="at least one shard, one block width",
            fix="record first; train one order model per block width",
        )
    arrays = {}
    for name in TENSORS:
        parts = [shard[name] for shard in shards]
        if name in ("block_step", "step_row"):
            starts = np.cumsum([0, *(part[-1] for part in parts)])
            parts = [part[:-1] + start for part, start in zip(parts, starts, strict=False)]
            parts.append(starts[-1:])
        arrays[name] = np.concatenate(parts)
    return Records(widths.pop(), arrays)
