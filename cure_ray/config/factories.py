"""Functions named in experiments, `package.module:function`: where their source is, its digest, and whether it may run.

Describing an experiment runs nothing: source is found without importing it. Running is allowed for modules of the working directory,
and for those a person has named (`--allow-code`, CURE_RAY_ALLOW_CODE): a file that came from elsewhere must not choose them.
"""

import ast
import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from cure_ray.errors import UserError

ALLOW = "CURE_RAY_ALLOW_CODE"  # modules, separated by commas; inherited by the processes of a cluster
_imported: dict[str, str] = {}  # module -> digest of its source when this process imported it


def split_factory(factory: str) -> tuple[str, str]:
    module, _, function = factory.partition(":")
    if not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise UserError(f"a function is named like package.module:factory, got {factory!r}")
    return module, function


def _top_spec(top: str) -> ModuleSpec | None:
    importlib.invalidate_caches()  # a file may have been written a moment ago
    here = PathFinder.find_spec(top, [str(Path.cwd())])
    if here is not None:
        return here
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, such as __main__
        return None


def _spec(module: str) -> ModuleSpec | None:
    """Where a module would come from. Unlike importlib's own search this imports no parent package."""
    top, *rest = module.split(".")
    spec, name = _top_spec(top), top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec


def _source(module: str) -> Path | None:
    spec = _spec(module)
    path = Path(spec.origin) if spec is not None and spec.origin is not None else None
    return path if path is not None and path.suffix == ".py" and path.is_file() else None


def _root(module: str) -> Path | None:
    """The directory a module's project begins in: where its top-level package or file lies."""
    spec = _top_spec(module.split(".")[0])
    if spec is None or spec.origin in (None, "built-in", "frozen"):
        found = next(iter(spec.submodule_search_locations or ()), None) if spec is not None else None  # a package without __init__
        return None if found is None else Path(found).resolve().parent
    path = Path(str(spec.origin)).resolve()
    return path.parent.parent if path.name == "__init__.py" else path.parent


def _in_working_directory(module: str) -> bool:
    return _root(module) == Path.cwd().resolve()


def comes_from(factory: str, directory: Path) -> bool:
    """Whether a factory's project begins in this directory."""
    return PathFinder.find_spec(split_factory(factory)[0].split(".")[0], [str(directory)]) is not None


def _is_library(root: Path) -> bool:
    return root.name in ("site-packages", "dist-packages") or root == Path(sysconfig.get_paths()["stdlib"]).resolve()


def _imports(module: str, path: Path) -> Iterator[str]:
    """Names a module imports, as far as its text says; `from a import b` may mean a module a.b."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise UserError(f"{path}: not valid Python ({error.msg}, line {error.lineno})") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _closure(module: str) -> Iterator[Path]:
    """The module's file and those of its own project it imports, parents included; libraries (ours too) are known by their versions."""
    root = _root(module)
    waiting, seen = [module], set[str]()
    while waiting:
        name = waiting.pop(0)
        if not name or name in seen or (name != module and (name.split(".")[0] == "cure_ray" or _root(name) != root)):
            continue
        seen.add(name)
        path = _source(name)
        if path is not None:
            yield path
        if root is None or _is_library(root):
            return
        waiting = [name.rpartition(".")[0], *waiting, *(_imports(name, path) if path is not None else ())]


def source_digest(factory: str) -> str:
    """Identity of a factory: the bytes of the source it is made of."""
    module, _ = split_factory(factory)
    if _source(module) is None:
        raise UserError(
            f"{factory}: no Python source of {module} in the working directory ({Path.cwd()}) or on PYTHONPATH; a factory is a function "
            "in a module, so that every process can import it"
        )
    digest = hashlib.sha256()
    for path in _closure(module):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def allow_code(modules: list[str]) -> None:
    """Let modules (and what is below them) run when an experiment names them, here and in the processes started from here."""
    known = [m for m in os.environ.get(ALLOW, "").split(",") if m]
    os.environ[ALLOW] = ",".join(dict.fromkeys([*known, *modules]))


def check_allowed(factory: str) -> None:
    """UserError unless the code may run."""
    module, _ = split_factory(factory)
    named = [m.strip() for m in os.environ.get(ALLOW, "").split(",") if m.strip()]
    if any(module == m or module.startswith(f"{m}.") for m in named):
        return
    if not _in_working_directory(module):
        raise UserError(
            f"{factory} is code from outside the working directory ({_source(module) or 'a built-in module'}), and an experiment alone may "
            f"not run it. If you trust it: --allow-code {module}, or the variable {ALLOW}={module}"
        )
    allow_code([module])  # for the processes started from here, whose working directory is another


def import_function(factory: str, where: str) -> Callable[..., Any]:
    """The function, imported; the working directory is looked into also where Python would not."""
    module, function = split_factory(factory)
    if _in_working_directory(module) and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise UserError(f"{where}: cannot import {module} ({error}); set PYTHONPATH to where it is") from error
    except UserError:
        raise
    except Exception as error:  # a syntax error, or whatever its top level does
        raise UserError(f"{where}: importing {module} failed ({type(error).__name__}: {error})") from error
    if not callable(made):
        raise UserError(f"{where}: {module} has no function {function!r}")
    return made


def load_factory(factory: str) -> Callable[..., Any]:
    """The function an experiment names, if it may run. The file that is imported must be the one whose source was found."""
    check_allowed(factory)
    module, _ = split_factory(factory)
    digest, path = source_digest(factory), _source(module)
    made = import_function(factory, f"network.factory {factory}")
    loaded = sys.modules[module].__file__
    if path is None or Path(loaded or "").resolve() != path.resolve():
        raise UserError(f"{factory}: {path} is hidden by another module of the same name ({loaded}): rename yours")
    if _imported.setdefault(module, digest) != digest:
        raise UserError(f"{factory}: its source has changed since this process imported it; start a new process")
    return made
