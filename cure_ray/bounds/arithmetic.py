"""Arithmetic that decides, and what counts as running out of memory."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


def out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "alloc" in text or "out of memory" in text


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Neither autocast nor TF32 or bfloat16 inside float32, deterministic kernels, no NNPACK (whose convolutions mix neighbours from 16
    images on), and subnormal numbers kept while bounds are computed; the caller's settings come back afterwards."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    saved = (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, matmul.allow_tf32)
    inside = [getattr(torch.backends.mkldnn, part) for part in ("conv", "matmul")]  # torch does not type them
    precisions = [part.fp32_precision for part in inside]
    flushing = not bool(torch.full((), 2.0**-1074, dtype=torch.float64) * 1)
    cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, matmul.allow_tf32 = False, True, False, False
    for part in inside:
        part.fp32_precision = "ieee"
    if flushing:
        torch.set_flush_denormal(False)
    try:
        with ExitStack() as off:
            off.enter_context(torch.backends.nnpack.flags(enabled=False))
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    off.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        if flushing:
            torch.set_flush_denormal(True)
        for part, precision in zip(inside, precisions, strict=True):
            part.fp32_precision = precision
        cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, matmul.allow_tf32 = saved
