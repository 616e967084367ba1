"""Weights from a file of somebody else's: arrays by name, out of .safetensors, .pt or .mat. No file can run code here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from cure_ray.errors import UserError


def read_weights(path: Path) -> dict[str, Tensor]:
    """Every array of a file by its name, with the numbers, types and shapes it has there."""
    if not path.is_file():
        raise UserError(f"--weights {path}: no such file")
    return _READERS.get(path.suffix, _read_pt)(path)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise UserError(f"--weights {path}: not a safetensors file ({error})") from error


def _read_pt(path: Path) -> dict[str, Tensor]:
    """A state dict, alone or under `state_dict`, read with weights_only."""
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(
            f"--weights {path}: cannot be read as plain tensors ({type(error).__name__}). Files that need code to be run are not "
            "loaded; save network.state_dict(), best with safetensors.torch.save_file."
        ) from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise UserError(f"--weights {path}: expected a state dict of tensors, got {type(state).__name__}")
    return state


def _read_mat(path: Path) -> dict[str, Tensor]:
    """Plain arrays of numbers of a MATLAB file; structs, cells, objects and functions are refused by name."""
    from scipy.io import loadmat

    try:
        content = loadmat(path, squeeze_me=False, chars_as_strings=False)
    except NotImplementedError:
        raise UserError(f"--weights {path}: a MATLAB file of version 7.3; save it with -v7, or its arrays as safetensors") from None
    except Exception as error:  # damaged bytes may raise anything
        raise UserError(f"--weights {path}: not a MATLAB file ({type(error).__name__}: {str(error).splitlines()[0][:100]})") from error
    arrays = {name: value for name, value in content.items() if not name.startswith("__")}
    strange = [name for name, value in arrays.items() if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu"]
    if strange or not arrays:
        what = f"{', '.join(strange)} is no plain array of numbers" if strange else "there is no array in it"
        raise UserError(f"--weights {path}: {what}; only such arrays are read")
    return {name: torch.from_numpy(np.ascontiguousarray(value.astype(value.dtype.newbyteorder("=")))) for name, value in arrays.items()}


_READERS: dict[str, Callable[[Path], dict[str, Tensor]]] = {".safetensors": _read_safetensors, ".mat": _read_mat}
