"""Keys and values of a request's prefix: buffers as large as a bucket, on the session's device, written in place."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from spot_deploy.engines.contracts import Array, TargetShape
from spot_deploy.engines.cuda import DeviceArray, DeviceView, Stream, as_dtype, copy_columns


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


class DevicePrefix:
    """On the GPU, [1, H, size, D] each."""

    def __init__(self, arrays: list[DeviceArray], size: int, stream: Stream):
        self.arrays, self.size, self._stream = arrays, size, stream
        for array in arrays:
            array.clear(stream)
        stream.wait()

    @property
    def past(self) -> DevicePrefix:
        return self

    def write(self, kept: Sequence[DeviceView], source: slice, start: int) -> None:
        for buffer, new in zip(self.arrays, kept, strict=True):
            count = source.stop - source.start
            copy_columns(buffer, start, new, source.start, count, self._stream, rows=buffer.shape[1])
        self._stream.wait()

    def take(self, other: DevicePrefix, count: int) -> None:
        for buffer, before in zip(self.arrays, other.arrays, strict=True):
            copy_columns(buffer, 0, before, 0, count, self._stream, rows=buffer.shape[1])
        self._stream.wait()


class DeviceSession:
    """What sessions that compute on the GPU have in common.

    Args:
        dtype: of keys and values.
    """

    fixed_shapes = False

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._spare: dict[tuple[int, ...], list[list[DeviceArray]]] = {}
        self._copies = Stream()

    def prefix(self, shape: TargetShape, size: int) -> DevicePrefix:
        """An empty prefix. Buffers are used again, at the same addresses, for which passes may have been recorded."""
        dims = (1, shape.kv_heads, size, shape.head_dim)
        spare = self._spare.setdefault(dims, [])
        arrays = spare.pop() if spare else [DeviceArray(self._dtype, dims) for _ in range(2 * shape.layers)]
        prefix = DevicePrefix(arrays, size, self._copies)
        weakref.finalize(prefix, spare.append, arrays).atexit = False
        return prefix

    def on_device(self, past: Any, stream: Stream) -> list[DeviceArray]:
        """The arrays of a prefix; what lies on the host, float32, is uploaded: probes make such."""
        if isinstance(past, DevicePrefix):
            return past.arrays
        found = [DeviceArray(self._dtype, array.shape) for array in past]
        for array, host in zip(found, past, strict=True):
            array.upload(as_dtype(host, self._dtype), stream)
            stream.wait()
        return found


class HostSession:
    """What sessions that compute on the host have in common."""

    fixed_shapes = False

    def prefix(self, shape: TargetShape, size: int) -> HostPrefix:
        """An empty prefix."""
        return HostPrefix(shape, size)
