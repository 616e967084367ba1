"""A corpus of files made to harm: every one is refused with a sentence, quickly, and runs nothing."""

import json
import pickle
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_helpers import tiny

from cure_ray.config import load_experiment
from cure_ray.errors import UserError
from cure_ray.networks.build import new_network
from cure_ray.runs.checkpoints import load_checkpoint, write_checkpoint
from cure_ray.search.space import load_sweep

TOUCHED = str(Path(tempfile.mkdtemp()) / "cure_ray_was_here")
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{n}: &{n} [{','.join(['*' + p] * 9)}]\n" for p, n in zip("abcdefgh", "bcdefghi", strict=True)
)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(TOUCHED),)


YAML: dict[str, str] = {
    "python_object": f"!!python/object/apply:os.system ['touch {TOUCHED}']",
    "python_object_in_field": f"name: !!python/object/apply:pathlib.Path.touch ['{TOUCHED}']\nbase: smoke\nspace: {{}}\ntrials: 1",
    "python_name": "name: !!python/name:os.system\n",
    "python_module": "training: !!python/module:os\n",
    "python_tuple": "training: !!python/tuple [1, 2]\n",
    "binary": "name: !!binary |\n  AAECAwQ=\n",
    "set": "training: !!set {a, b}\n",
    "billion_laughs": LAUGHS + "training: *i\n",
    "billion_laughs_as_name": LAUGHS + "name: *i\n",
    "deep": "training: " + "[" * 500 + "]" * 500,
    "recursive": "training: &t {eta: *t}\n",
    "repeated_key": "name: a\nname: b\n",
    "two_documents": "name: a\n---\nname: b\n",
    "scalar": "42",
    "list": "- 1\n- 2\n",
    "traversal_name": "name: ../../etc/passwd\nbase: smoke\nspace: {}\ntrials: 1\n",
    "shell_name": "name: '$(touch x)'\nbase: smoke\nspace: {}\ntrials: 1\n",
    "not_text": "\xff\xfe\x00\x01",
    "nan": "training: {lr: .nan}\n",
    "infinite": "training: {lr: .inf}\n",
    "huge_number": "training: {epochs: 1" + "0" * 5000 + "}\n",
    "expression": "training: {lr: '__import__(\"os\").getcwd()'}\n",
}


@pytest.mark.parametrize("name", YAML)
@pytest.mark.parametrize("load", [load_experiment, load_sweep], ids=["experiment", "sweep"])
def test_malicious_yaml_is_refused(tmp_path: Path, name: str, load: Callable[[Path], object]) -> None:
    (tmp_path / "evil.yaml").write_bytes(YAML[name].encode("latin-1" if name == "not_text" else "utf-8"))
    began = time.perf_counter()
    with pytest.raises(UserError) as refused:
        load(tmp_path / "evil.yaml")
    assert time.perf_counter() - began < 5
    assert len(str(refused.value)) < 20_000
    assert not Path(TOUCHED).exists()


def _meta(directory: Path, **changes: Any) -> None:
    meta = json.loads((directory / "meta.json").read_text())
    (directory / "meta.json").write_text(json.dumps({**meta, **changes}))


def _pickle(directory: Path) -> None:
    (directory / "weights.safetensors").write_bytes(pickle.dumps(Evil()))


def _pickle_with_matching_digest(directory: Path) -> None:
    import hashlib

    data = pickle.dumps(Evil())
    (directory / "weights.safetensors").write_bytes(data)
    _meta(directory, files={"weights.safetensors": hashlib.sha256(data).hexdigest()})


def _header_bomb(directory: Path) -> None:
    import hashlib

    data = struct.pack("<Q", 2**62) + b"{}"
    (directory / "weights.safetensors").write_bytes(data)
    _meta(directory, files={"weights.safetensors": hashlib.sha256(data).hexdigest()})


def _flipped(directory: Path) -> None:
    data = bytearray((directory / "weights.safetensors").read_bytes())
    data[-5] ^= 0xFF
    (directory / "weights.safetensors").write_bytes(bytes(data))


def _other_architecture(directory: Path) -> None:
    meta = json.loads((directory / "meta.json").read_text())
    meta["experiment"]["network"]["width"] = 3.0
    (directory / "meta.json").write_text(json.dumps(meta))


CHECKPOINTS: dict[str, Callable[[Path], Any]] = {
    "pickle": _pickle,
    "pickle_with_matching_digest": _pickle_with_matching_digest,
    "header_bomb": _header_bomb,
    "flipped_bit": _flipped,
    "truncated": lambda d: (d / "weights.safetensors").write_bytes((d / "weights.safetensors").read_bytes()[:100]),
    "empty_weights": lambda d: (d / "weights.safetensors").write_bytes(b""),
    "no_weights": lambda d: (d / "weights.safetensors").unlink(),
    "meta_is_pickle": lambda d: (d / "meta.json").write_bytes(pickle.dumps(Evil())),
    "meta_is_list": lambda d: (d / "meta.json").write_text("[]"),
    "meta_is_deep": lambda d: (d / "meta.json").write_text("[" * 100_000),
    "other_format": lambda d: _meta(d, format="torch"),
    "file_outside": lambda d: _meta(d, files={"../../../../etc/passwd": "0" * 64, "weights.safetensors": "0" * 64}),
    "no_files": lambda d: _meta(d, files={}),
    "wrong_digest": lambda d: _meta(d, digest="0" * 64),
    "no_experiment": lambda d: _meta(d, experiment={"name": "../../x"}),
    "unknown_setting": lambda d: _meta(d, experiment={"trainer": "evil.module:run"}),
    "other_architecture": _other_architecture,
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_malicious_checkpoints_are_refused(tmp_path: Path, name: str) -> None:
    experiment = tiny()
    directory = tmp_path / "epoch_0001"
    write_checkpoint(directory, experiment, 1, new_network(experiment).state_dict(), {}, {})
    load_checkpoint(directory)
    CHECKPOINTS[name](directory)
    with pytest.raises(UserError):
        load_checkpoint(directory)
    assert not Path(TOUCHED).exists()
