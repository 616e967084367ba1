"""Import auto_LiRPA on a modern torch: 0.3 (PyPI, 2022) needs four things put back, 0.7.1 (its repository) none.

Everything here is inert when the name already exists, so the same call serves both versions.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import types
import warnings
from typing import Any

import numpy as np
import torch

from cure_ray.errors import UserError

INSTALL_HINT = (
    "auto_LiRPA, the second bound engine, is not installed. "
    "Run: pip install 'cure-ray[lirpa]' && pip install --no-deps auto_LiRPA==0.3. "
    "Or use the native engine, which needs nothing else."
)


def load() -> Any:
    """The auto_LiRPA module, ready to use; a UserError with the commands to type if it is not installed."""
    if "auto_LiRPA" in sys.modules:
        return sys.modules["auto_LiRPA"]
    try:
        importlib.metadata.distribution("auto_LiRPA")
    except importlib.metadata.PackageNotFoundError:
        if importlib.util.find_spec("auto_LiRPA") is None:
            raise UserError(INSTALL_HINT) from None
    borrowed, recursion_limit = _put_back_numpy_arraysetops(), sys.getrecursionlimit()
    _put_back_set_opset_version()
    _put_back_node_getitem()
    try:
        # auto_LiRPA changes the warning filters of the whole process on import, so ignoring is not enough: record and forget.
        with warnings.catch_warnings(record=True):
            module = importlib.import_module("auto_LiRPA")
    except ImportError as error:
        raise UserError(f"auto_LiRPA is installed but cannot be imported: {error}. {INSTALL_HINT}") from error
    finally:
        sys.setrecursionlimit(recursion_limit)  # 0.3 sets it to a million, which turns a runaway recursion into a crash
        for name in borrowed:
            sys.modules.pop(name, None)
    _accept_remove_duplicate(module.BoundedModule)
    return module


def version() -> str:
    """The version of the auto_LiRPA that is loaded. Metadata may be of another copy: PYTHONPATH goes before what is installed."""
    own = getattr(load(), "__version__", None)
    try:
        return str(own or importlib.metadata.version("auto_LiRPA"))
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _put_back_numpy_arraysetops() -> list[str]:
    """numpy 2 made numpy.lib.arraysetops private; 0.3 imports `isin` from it (and never calls it)."""
    try:
        importlib.import_module("numpy.lib.arraysetops")
        return []
    except ImportError:
        module = types.ModuleType("numpy.lib.arraysetops")
        module.isin = np.isin  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module
        return [module.__name__]


def _put_back_set_opset_version() -> None:
    """torch dropped this helper; 0.3 calls it before it lowers a traced graph to ONNX operators."""
    helper: Any = importlib.import_module("torch.onnx.symbolic_helper")
    if hasattr(helper, "_set_opset_version"):
        return

    def set_opset_version(opset: int) -> None:
        globals_ = importlib.import_module("torch.onnx._internal.torchscript_exporter._globals").GLOBALS
        globals_.export_onnx_opset_version = opset

    helper._set_opset_version = set_opset_version


def _put_back_node_getitem() -> None:
    """torch dropped `node[name]` for attributes of graph nodes; each kind has its own getter (`i`, `f`, `t`, ...)."""
    node: Any = torch._C.Node
    if hasattr(node, "__getitem__"):
        return

    def get(self: Any, name: str) -> Any:
        return getattr(self, self.kindOf(name))(name)

    node.__getitem__ = get


def _accept_remove_duplicate(bounded_module: Any) -> None:
    """nn.Module passes `remove_duplicate` to `_named_members` since torch 2.0; the override of 0.3 does not know it."""
    original = bounded_module._named_members
    if "remove_duplicate" in inspect.signature(original).parameters:
        return

    def named_members(self: Any, *args: Any, remove_duplicate: bool = True, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    bounded_module._named_members = named_members
