"""Keys and values of a request's prefix: buffers as large as a bucket, on the session's device, written in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from spot_deploy.engines.contracts import Array, TargetShape


class Prefix(Protocol):
    """Buffers of one size, which never move.

    Attributes:
        size: columns, of which the request fills some.
        past: what `TargetInputs.past` takes.
    """

    size: int

    @property
    def past(self) -> Any: ...

    def write(self, kept: Sequence[Any], source: slice, start: int) -> None:
        """Put columns `source` of the first segment in `kept` (see TargetOutputs) to columns `start` and on."""
        ...

    def take(self, other: Any, count: int) -> None:
        """Put the first `count` columns of another prefix of the same session to columns 0 and on."""
        ...


class HostPrefix:
    """In memory, float32 [1, H, size, D] each."""

    def __init__(self, shape: TargetShape, size: int):
        self.size = size
        dims = (1, shape.kv_heads, size, shape.head_dim)
        self.past: list[Array] = [np.zeros(dims, np.float32) for _ in range(2 * shape.layers)]

    def write(self, kept: Sequence[Array], source: slice, start: int) -> None:
        for buffer, new in zip(self.past, kept, strict=True):
            part = new[:, 0, :, source]
            buffer[:, :, start : start + part.shape[2]] = part

    def take(self, other: HostPrefix, count: int) -> None:
        for buffer, before in zip(self.past, other.past, strict=True):
            buffer[:, :, :count] = before[:, :, :count]


class HostSession:
    """What sessions that compute on the host have in common."""

    def prefix(self, shape: TargetShape, size: int) -> HostPrefix:
        """An empty prefix."""
        return HostPrefix(shape, size)
