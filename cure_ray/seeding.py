"""One seed, many named generators: nothing random depends on which branch, worker or process ran first.

A stream is named by (seed, names...), for example (0, epoch 7, "ct", "attack_l2"). Its state is a hash of the name, so any stream
can be re-created anywhere, and a resumed run needs no generator state. Torch is imported where it is used: deriving a seed needs none.
"""

import hashlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream of this name."""
    text = "/".join([str(seed), *(str(name) for name in names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(device: "torch.device | str", seed: int, *names: str | int) -> "torch.Generator":
    """A generator on `device` for the stream of this name."""
    import torch

    return torch.Generator(device=device).manual_seed(derive(seed, *names))


def make_deterministic(threads: int) -> None:
    """Same bits every time: deterministic kernels, no TF32, a fixed number of CPU threads."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def resolve_device(name: str) -> "torch.device":
    """`auto` is the first GPU if there is one."""
    import torch

    from cure_ray.errors import UserError

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name}: this machine has no usable CUDA GPU (or a CPU build of torch); use cpu or auto")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise UserError(f"device {name}: this machine has {torch.cuda.device_count()} GPUs, numbered from 0")
    return device
