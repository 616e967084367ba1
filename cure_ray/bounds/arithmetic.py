"""Arithmetic that decides, and what counts as running out of memory."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "alloc" in text or "out of memory" in text


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Neither autocast nor TF32 or bfloat16 inside float32, deterministic kernels, no NNPACK (whose convolutions mix neighbours from 16
    images on), and subnormal numbers kept while bounds are computed; the caller's settings come back afterwards."""
    flushing = not bool(torch.full((), 2.0**-1074, dtype=torch.float64) * 1)
    if flushing:
        torch.set_flush_denormal(False)
    try:
        with ExitStack() as off:
            off.enter_context(_of_the_process())
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    off.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        if flushing:
            torch.set_flush_denormal(True)


_LOCK = threading.Lock()
_HELD: list[Callable[[], None]] = []  # what gives the settings back, once for everybody who computes bounds at this moment


@contextmanager
def _of_the_process() -> Iterator[None]:
    """Settings that all threads share: the first that enters sets them, the last that leaves gives them back."""
    with _LOCK:
        _HELD.append(_HELD[0] if _HELD else _set_exact())
    try:
        yield
    finally:
        with _LOCK:
            give_back = _HELD.pop()
            if not _HELD:
                give_back()


def _set_exact() -> Callable[[], None]:
    """Set them; the function returned gives back what was there. torch keeps precisions twice, and refuses to read the older settings
    while they differ from the newer ones: so both are set, and agree, while bounds are computed."""
    backends: Any = torch.backends  # torch does not type all of its parts
    matmul, cudnn, mkldnn = backends.cuda.matmul, backends.cudnn, backends.mkldnn
    products = [(matmul, backends), (cudnn.conv, cudnn), (cudnn.rnn, cudnn), (mkldnn.conv, mkldnn), (mkldnn.matmul, mkldnn)]
    precisions = [part.fp32_precision for part, _ in products]
    inherited = [precision == above.fp32_precision for precision, (_, above) in zip(precisions, products, strict=True)]
    named, allowed = _named_precision(), (_allowed_in(matmul, matmul), _allowed_in(cudnn, cudnn.conv, cudnn.rnn))
    chosen = (cudnn.deterministic, cudnn.benchmark)
    (nnpack,) = backends.nnpack.set_flags(False)
    cudnn.deterministic, cudnn.benchmark = True, False
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    for part, _ in products:
        part.fp32_precision = "ieee"

    def give_back() -> None:
        matmul.allow_tf32, cudnn.allow_tf32 = allowed
        if named is not None:
            torch.set_float32_matmul_precision(named)
        for (part, _), precision, follows in zip(products, precisions, inherited, strict=True):
            part.fp32_precision = "none" if follows else precision  # what follows the setting above it goes on following
        cudnn.deterministic, cudnn.benchmark = chosen
        backends.nnpack.set_flags(nnpack)

    return give_back


def _named_precision() -> str | None:
    """That of products of matrices by its oldest name; none where it has no such name."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _allowed_in(older: Any, *newer: Any) -> bool:
    """`allow_tf32`. Where torch refuses to read it, its newer counterparts are moved until torch does, or it is found to be the other."""
    try:
        return bool(older.allow_tf32)
    except RuntimeError:
        for part in newer:
            part.fp32_precision = "tf32"
    try:
        return bool(older.allow_tf32)
    except RuntimeError:
        return False
