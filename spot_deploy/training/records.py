"""Recorded draft-free trajectories: the order model's training data (SPOT, section 3.1).

A folder of shards (safetensors) and `records.json`. Per pass the stale summary that the order model reads (top-32
log-probabilities and ids, mass of the rest, log-odds of the top token) of every masked position, and the commit that
followed. A shard that is there is not recorded again, so recording goes on where it stopped.

| tensor | dtype, shape | meaning |
| --- | --- | --- |
| block_step | int64 [B + 1] | first pass of each block |
| given | bool [B, L] | positions that hold the prompt |
| block | int64 [B] | index of the block from the start of the sequence |
| temperature, seed | float32, uint64 [B] | |
| step_row | int64 [S + 1] | first row of each pass; rows are its masked positions, rising |
| position, token | int32 [S] | the commit |
| log_p, ids | float16, int32 [N, 32] | |
| rest, log_odds | float32 [N] | |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from spot_deploy.engines.contracts import Array
from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.engines.files import read_json
from spot_deploy.runtime.features import TOP, Stale
from spot_deploy.runtime.head import Head
from spot_deploy.runtime.noise import Noise
from spot_deploy.runtime.sampler import candidate_odds
from spot_deploy.runtime.state import Commit, State

FORMAT = "spot-deploy-records"
META = "records.json"
ROWS = ("log_p", "ids", "rest", "log_odds")
INDEX = ("block_step", "given", "block", "temperature", "seed", "step_row", "position", "token")
OPEN_SHARDS = 256  # kept open at a time
DEPTHS = (1, 2, 4, 8, 16)  # at which accuracy is reported; depth 1 follows the root


class Recorder:
    """Collects what a decode observes (see decode.Observer)."""

    def __init__(self, width: int):
        self._width = width
        self._columns: dict[str, list[Any]] = {
            name: [] for name in ("given", "block", "temperature", "seed", "position", "token", *ROWS)
        }
        self._block_step: list[int] = []
        self._rows = [0]
        self.temperature, self.seed = 0.0, 0

    def __call__(self, state: State, head: Head, commit: Commit) -> None:
        columns = self._columns
        if state.commits == 0:
            self._block_step.append(len(columns["position"]))
            columns["given"].append(state.tokens != state.mask_id)
            columns["block"].append(state.block)
            columns["temperature"].append(self.temperature)
            columns["seed"].append(self.seed)
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
            "block": np.array(columns["block"], np.int64),
            "temperature": np.array(columns["temperature"], np.float32),
            "seed": np.array(columns["seed"], np.uint64),
            "step_row": np.array(self._rows, np.int64),
            "position": np.array(columns["position"], np.int32),
            "token": np.array(columns["token"], np.int32),
        }


@dataclass(frozen=True)
class Records:
    """Trajectories of one block width: an index in memory, rows read from the shards as they are asked for.

    Attributes:
        width: block width L.
        index: the tensors INDEX of all shards, joined.
        shards: files.
        first_row: of each shard, and the end [shards + 1].
    """

    width: int
    index: dict[str, Array]
    shards: tuple[Path, ...]
    first_row: Array

    @property
    def blocks(self) -> int:
        return len(self.index["given"])

    @property
    def passes(self) -> int:
        return len(self.index["position"])

    def steps(self, block: int) -> range:
        """The passes of a block."""
        return range(int(self.index["block_step"][block]), int(self.index["block_step"][block + 1]))

    def commits(self, steps: Sequence[int]) -> list[Commit]:
        return [Commit(int(self.index["position"][s]), int(self.index["token"][s])) for s in steps]

    def stale(self, block: int, step: int) -> Stale:
        """The stale distributions after a pass of a block.

        Raises:
            SpotDeployError: the shard that holds them is gone or damaged.
        """
        masked = ~self.index["given"][block]
        masked[self.index["position"][self.steps(block).start : step]] = False
        first, last = (int(r) for r in self.index["step_row"][step : step + 2])
        shard = int(np.searchsorted(self.first_row, first, side="right")) - 1
        offset = int(self.first_row[shard])
        file = _open_shard(self.shards[shard])
        log_p, ids, rest, log_odds = (file.get_slice(name)[first - offset : last - offset] for name in ROWS)
        return Stale(
            self.width,
            np.flatnonzero(masked),
            log_p.astype(np.float64),
            ids,
            rest.astype(np.float64),
            log_odds.astype(np.float64),
        )

    def candidate_odds(self, block: int, stale: Stale, commits: int) -> Array:
        """Log-odds of the candidates for a later commit of a block, coupled to the noise that it was recorded with [M].

        Args:
            stale: the stale distributions, from `stale`.
            commits: number of the commit within the block.
        """
        if not self.index["temperature"][block]:
            return stale.log_odds
        missing = np.full((len(stale.positions), 1), -np.inf)  # the head's last logit, which bounds the rest
        head = Head(
            stale.positions,
            np.concatenate((stale.log_p, missing), axis=1),
            np.concatenate((stale.ids, np.full_like(stale.ids[:, :1], -1)), axis=1).astype(np.int64),
            np.log(np.maximum(stale.rest, 1e-30)),
            None,
            1.0,
            lambda m: stale.log_p[m],
        )
        state = State(int(self.index["block"][block]), np.zeros(self.width, np.int64), -1)
        return candidate_odds(head, state, Noise(int(self.index["seed"][block])), commits)


@lru_cache(maxsize=OPEN_SHARDS)
def _open_shard(path: Path) -> Any:
    """A shard, mapped into memory."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "numpy")
    except (SafetensorError, OSError) as error:
        raise SpotDeployError(
            "records", f"cannot read {path}", seen=str(error), fix="delete it and record again"
        ) from error


def load_records(folders: Sequence[Path]) -> list[Records]:
    """Open the shards of one or more folders; of each only the index is read.

    Returns:
        Records by block width, rising.

    Raises:
        SpotDeployError: a folder holds no records, or a shard is damaged.
    """
    from safetensors import SafetensorError

    _open_shard.cache_clear()  # a path may hold other records by now
    found: dict[int, list[tuple[Path, dict[str, Array]]]] = defaultdict(list)
    for folder in folders:
        meta = read_json(folder / META, code="records", fix="give folders that spot-deploy record wrote")
        if not isinstance(meta, dict) or meta.get("format") != FORMAT or type(meta.get("block_width")) is not int:
            raise SpotDeployError("records", f"{folder} holds no records", fix="spot-deploy record makes them")
        for path in sorted(folder.glob("shard-*.safetensors")):
            file = _open_shard(path)
            try:
                index = {name: file.get_tensor(name) for name in INDEX}
                rows = {file.get_slice(name).get_shape()[0] for name in ROWS}
            except SafetensorError as error:
                raise SpotDeployError(
                    "records", f"cannot read {path}", seen=str(error), fix="delete it and record again"
                ) from error
            if rows != {int(index["step_row"][-1])}:
                raise SpotDeployError(
                    "records",
                    f"{path} does not hold the rows that it names",
                    seen=str(sorted(rows)),
                    wanted=str(index["step_row"][-1]),
                    fix="delete it and record again",
                )
            found[meta["block_width"]].append((path, index))
    if not found:
        seen = ", ".join(map(str, folders))
        raise SpotDeployError("records", "there are no shards", seen=seen, fix="record first")
    return [_join(width, *zip(*shards, strict=True)) for width, shards in sorted(found.items())]


def _join(width: int, paths: tuple[Path, ...], parts: tuple[dict[str, Array], ...]) -> Records:
    index = {}
    for name in INDEX:
        arrays = [part[name] for part in parts]
        if name in ("block_step", "step_row"):
            starts = np.cumsum([0, *(a[-1] for a in arrays)])
            arrays = [a[:-1] + start for a, start in zip(arrays, starts, strict=False)]
            arrays.append(starts[-1:])
        index[name] = np.concatenate(arrays)
    return Records(width, index, paths, np.cumsum([0, *(part["step_row"][-1] for part in parts)]))
