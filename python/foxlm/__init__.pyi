"""Types of the public functions; see the functions themselves for shapes and meaning."""

from typing import Any, Literal, TypeVar

import numpy as np

from .model import Model as Model

Array = TypeVar("Array", bound=Any)
"""`numpy.ndarray` or `torch.Tensor`, scans `torch.Tensor` alone: what goes in comes out."""

__version__: str

def forgetting_attention(
    q: Array,
    k: Array,
    v: Array,
    log_fgate: Array | None = None,
    *,
    head_first: bool = False,
    seq_start: Array | None = None,
    sm_scale: float | None = None,
    adaptive_threshold: Literal["auto"] | float | Array | None = None,
    cu_seqlens: Array | None = None,
    window: int | None = None,
    causal: bool = True,
    log_tolerance: float | None = None,
    return_lse: bool = False,
) -> Any: ...
def forgetting_attention_backward(
    d_out: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    log_fgate: np.ndarray | None,
    o: np.ndarray,
    lse: np.ndarray,
    *,
    sm_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    seq_start: np.ndarray | None = None,
    cu_seqlens: np.ndarray | None = None,
    log_tolerance: float | None = None,
    adaptive_threshold: Literal["auto"] | float | np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]: ...
def parallel_forgetting_attn(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    scale: float | None = None,
    window_size: int | None = None,
    cu_seqlens: Array | None = None,
    head_first: bool = False,
    **kwargs: Any,
) -> Array: ...
def chunk_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Array | None = None,
) -> tuple[Array, Array | None]: ...
def chunk_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Array | None = None,
) -> tuple[Array, Array | None]: ...
def chunk_gla(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
) -> tuple[Array, Array | None]: ...
def chunk_simple_gla(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
) -> tuple[Array, Array | None]: ...
def mamba_chunk_scan_combined(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    chunk_size: int | None = None,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    initial_states: Array | None = None,
    seq_idx: None = None,
    cu_seqlens: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = ...,
    return_final_states: bool = False,
) -> Any: ...
def threads() -> int:
    """Number of threads that ops on the CPU use."""

def set_threads(count: int) -> None:
    """Sets the number of threads that ops on the CPU use; 0 for all cores."""

def cuda_memory() -> int:
    """Bytes of scratch memory that are held on GPUs, beside what PyTorch allocates."""
