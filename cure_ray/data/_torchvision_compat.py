"""Lets the CUDA-built torchvision wheel import beside a CPU build of torch.

That combination (which a plain `pip install` produces on machines with only a CPU torch wheel) fails at import with "operator
torchvision::nms does not exist", because the compiled operators could not be loaded. Only data sets are used here, so declaring
the two missing schemas is enough. Where the operators exist this module does nothing.
"""

import importlib
import sys
from types import ModuleType

import torch

_MISSING = ("nms", "qnms")
_libraries: list[torch.library.Library] = []  # a Library withdraws its definitions when it is collected


def _operator_exists(name: str) -> bool:
    try:
        torch._C._get_schema(f"torchvision::{name}", "")
    except RuntimeError:
        return False
    return True


def declare_missing_operators() -> list[str]:
    """Declare the schemas torchvision expects and return which were missing."""
    missing = [name for name in _MISSING if not _operator_exists(name)]
    for name in missing:
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)
    return missing


def import_torchvision_datasets() -> ModuleType:
    """`torchvision.datasets`, whatever the build."""
    try:
        return importlib.import_module("torchvision.datasets")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for name in [m for m in sys.modules if m == "torchvision" or m.startswith("torchvision.")]:
        del sys.modules[name]
    declare_missing_operators()
    return importlib.import_module("torchvision.datasets")
