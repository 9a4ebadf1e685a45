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

    def __init__(self, tensors: list, what: str, group: object, rank: int, world_size: int, group_name: str, takes_buffers: bool = False, can_average: bool = False, transport_version: str = '', timeout_s: float | None = None, checks_collectives: bool = False, device_library: str | None = None, device: int = 0) -> None: ...

    def begin_step(self, gradient_scale: float = 1.0, keeps_local_gradients: bool = False, holds_zero_gradients: bool = False, device_stream: int = 0, device_gradient_scale: int = 0) -> None: ...

    def submit(self, map: BucketMap, base: int) -> None: ...

    def submit_buffer(self, map: BucketMap, data: int, elems: int, dtype: int) -> None: ...

    def finish_step(self, local_gradient: Callable | None = None) -> bool: ...

    def pass_step(self) -> None: ...

    def abandon(self, why: str) -> None: ...

    def describe(self) -> str: ...

    def report(self) -> dict: ...

    def save_state(self) -> dict: ...

    def load_state(self, state: dict) -> str: ...

    def switch_plan(self, json: str) -> None: ...

    def check_replicas(self, tensors: Sequence[tuple[str, int, int]]) -> None:
        """Of each tensor name, address and bytes."""

    def start_trace(self, capacity: int) -> None: ...

    def trace_json(self) -> str: ...

    def take_news(self) -> list[str]:
        """What auto has to say since the last call."""

    def decision(self) -> object:
        """Of auto; else None."""

    @property
    def is_auto(self) -> bool: ...

    @property
    def may_pass(self) -> bool:
        """Of auto; else false."""

    @property
    def spec(self) -> str: ...

    @property
    def timeout_s(self) -> float: ...

    @property
    def sends_buffers(self) -> bool: ...

class Kfac:
    """
    cortado::Kfac over a process group given as a Python object, or None for one rank.
    """

    def __init__(self, layers: Sequence[tuple[str, int, int, bool, int, Sequence[tuple[int, int, int, int, int]] | None]], options: dict, group: object | None, rank: int, world_size: int, group_name: str) -> None: ...

    def wants_batches(self, layer: int) -> bool: ...

    def add_batch(self, layer: int, is_activations: bool, data: int, dtype: int, count: int, height: int = 1, width: int = 1, scale: float = 1.0, device_stream: int = 0) -> None: ...

    def reset_batch(self) -> None: ...

    def release_batches(self, device_stream: int) -> None: ...

    def reduce_gradients(self, gradients: Sequence[tuple[int, int, int]], device_stream: int = 0) -> None: ...

    def step(self, factor_decay: float, damping: float, kl_clip: float, lr: float, update_factors: bool, update_inverses: bool, gradients: Sequence[tuple[int, int, int]], device_stream: int = 0) -> bool: ...

    def set_compression(self, spec: str) -> None: ...

    def set_factor_compression(self, spec: str) -> None: ...

    def set_candidates(self, specs: Sequence[str]) -> None: ...

    def report(self) -> dict: ...

    def memory(self) -> dict: ...

    def save_state(self, with_inverses: bool = True) -> dict: ...

    def load_state(self, states: Sequence[dict]) -> str: ...

    @property
    def steps(self) -> int: ...

    @property
    def placements(self) -> list[tuple[int, int, int]]: ...

class OwnerGather:
    """cortado::OwnerGather over a process group given as a Python object."""

    def __init__(self, tensors: Sequence[tuple[str, int, int, int, int]], codec: str, use_error_feedback: bool, aggregate: int, random_seed: int, timeout_s: float, group: object | None, rank: int, world_size: int, group_name: str, checks_collectives: bool) -> None: ...

    def run(self, step: int, addresses: Sequence[int]) -> None: ...

    def set_codec(self, spec: str) -> None: ...

    def report(self) -> dict: ...

    def save_residuals(self) -> dict: ...

    def load_residuals(self, residuals: dict) -> None: ...

def calibrate(group: object | None, rank: int, world_size: int, group_name: str, codecs: Sequence[str], budget_s: float, name: str, transport_version: str, known: str | None = None, note: Callable | None = None, progress: Callable | None = None, device_library: str | None = None, device: int = 0, computation: Callable | None = None) -> str:
    """Every rank: the text of a cluster file (cortado.cluster/1)."""

def relative_error(spec: str, matrix: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> float:
    """What a codec loses of a float32 matrix, as a share of its norm."""

def auto_codecs() -> list[str]:
    """The codecs of all settings that auto knows."""

def auto_settings() -> list:
    """
    What auto knows: specification, the quality from which on it may be used, and why.
    """

def canonical_job(json: str) -> str:
    """Checks the text of a job file and returns it as cortado writes it."""

def canonical_cluster(json: str) -> str:
    """Checks the text of a cluster file and returns it as cortado writes it."""

def save_job(json: str, path: bytes) -> None: ...

def save_cluster(json: str, path: bytes) -> None: ...

def write_file(path: bytes, text: str) -> None:
    """Replaces a file once all of the text is written."""

def trace_to_text(json: str) -> str: ...

def trace_to_chrome(json: str) -> str: ...

def summarize_trace(json: str, by_tensor: bool) -> str: ...

def canonical_spec(spec: str) -> str:
    """
    Checks a codec string, or one of auto, and returns it with defaults left out.
    """

def canonical_plan(json: str) -> str:
    """Checks the text of a plan and returns it as cortado writes it."""

def save_plan(json: str, path: bytes) -> None: ...

def plan_hash(json: str) -> int: ...

def device_count(device_library: str) -> int:
    """How many devices the library at this path finds."""

def compress(array: Annotated[NDArray, dict(order='C', device='cpu', writable=False)], spec: str, seed: int = 0, chunk_elems: int = 0) -> bytes:
    """The bytes of a codec file (docs/wire_format.md)."""

def decompress(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], as_torch: bool) -> object:
    """The array that a codec file holds."""
