"""Cortado's C++ engine; use it through the cortado package."""

from collections.abc import Callable, Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


class BucketMap:
    """Tensor indices and byte offsets of one gradient buffer."""

    def __init__(self, tensors: Sequence[int], offsets_bytes: Sequence[int]) -> None: ...

class Engine:
    """cortado::Engine over a process group given as a Python object."""

    def __init__(self, tensors: list, spec: str, group: object, rank: int, world_size: int, group_name: str) -> None: ...

    def begin_step(self, gradient_scale: float = 1.0, keeps_local_gradients: bool = False, holds_zero_gradients: bool = False) -> None: ...

    def submit(self, map: BucketMap, base: int) -> None: ...

    def submit_buffer(self, data: int, elems: int, dtype: int) -> None: ...

    def finish_step(self, local_gradient: Callable | None = None) -> bool: ...

    def abandon(self, why: str) -> None: ...

    def describe(self) -> str: ...

    def report(self) -> dict: ...

    def save_state(self) -> dict: ...

    def load_state(self, state: dict) -> str: ...

    def start_trace(self, capacity: int) -> None: ...

    def write_trace(self, path: str) -> None: ...

    @property
    def spec(self) -> str: ...

    @property
    def timeout_s(self) -> float: ...

    @property
    def sends_buffers(self) -> bool: ...

def canonical_spec(spec: str) -> str:
    """Checks a codec string and returns it with defaults left out."""

def compress(array: Annotated[NDArray, dict(order='C', device='cpu', writable=False)], spec: str, seed: int = 0, chunk_elems: int = 0) -> bytes:
    """The bytes of a codec file (docs/wire_format.md)."""

def decompress(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], as_torch: bool) -> object:
    """The array that a codec file holds."""
