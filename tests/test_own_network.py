"""A user's own network in training: described without running it, part of the hash by its source, run only if it may, refused by name."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import yaml

from cure_ray.cluster.submit import check_code, entrypoint
from cure_ray.config import Experiment, dump_experiment, load_experiment, resolve
from cure_ray.config.factories import ALLOW, allow_code, load_factory
from cure_ray.errors import UserError
from cure_ray.networks.build import new_network
from cure_ray.runs.checkpoints import load_checkpoint
from cure_ray.runs.run import train_run
from cure_ray.search.space import experiment_at, load_sweep

ROOT = Path(__file__).parent.parent
NETS = """
from collections import OrderedDict
import torch
from torch import nn
from cure_ray.networks.models import Normalize
from shapes.sizes import hidden

relu = nn.ReLU()

def small(width=4, classes=3):
    stem = nn.Sequential(nn.Conv2d(1, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), relu)
    return nn.Sequential(OrderedDict(norm=Normalize([0.5], [0.5]), stem=stem, flat=nn.Flatten(),
                                     fc=nn.Linear(9 * width, hidden()), act=relu, out=nn.Linear(hidden(), classes)))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a package, a module and images."""
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes" / "__init__.py").write_text("")
    (tmp_path / "shapes" / "sizes.py").write_text("def hidden():\n    return 8\n")
    (tmp_path / "own_nets.py").write_text(NETS)
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    images = (rng.integers(0, 60, (60, 1, 6, 6)) + 90 * labels[:, None, None, None]).astype(np.uint8)
    np.savez(tmp_path / "mine.npz", images=images, labels=labels)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ALLOW, "")
    monkeypatch.setattr("cure_ray.config.factories._imported", {})
    paths, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = paths
    for name in set(sys.modules) - modules:
        if name.split(".")[0] in ("own_nets", "shapes", "elsewhere", "noisy", "odd", "colorsys", "renamed"):
            del sys.modules[name]
    importlib.invalidate_caches()


def experiment(factory: str = "own_nets:small", arguments: dict[str, Any] | None = None, **more: Any) -> Experiment:
    return resolve(
        {
            "preset": "smoke", "scale": 0.1, "dataset": {"path": "mine.npz", "validation": 8},
            "network": {"factory": factory, **({"arguments": arguments} if arguments else {})},
            "training": {"method": "max", "batch_size": 8}, "threats": {"linf": 0.05, "l2": 0.2, "l1": 0.4}, **more,
        }
    )  # fmt: skip


def test_the_layers_keep_their_names_and_the_seed_decides_the_weights(project: Path) -> None:
    network = new_network(experiment())
    assert set(network.state_dict()) >= {"stem.0.weight", "stem.1.running_mean", "fc.weight", "out.bias"}
    assert (network.input_shape, network.num_classes, len(network)) == ((1, 6, 6), 3, 6)
    again, other = new_network(experiment()), new_network(experiment(seed=1))
    assert torch.equal(network.state_dict()["fc.weight"], again.state_dict()["fc.weight"])
    assert not torch.equal(network.state_dict()["fc.weight"], other.state_dict()["fc.weight"])


def test_own_network_and_images_are_trained_certified_and_exported(project: Path) -> None:
    """In another interpreter, whose search path does not have the working directory, as a shell starts it."""
    (project / "e.yaml").write_text(
        "preset: smoke\nscale: 0.1\ndataset: {path: mine.npz, validation: 8}\ntraining: {method: max, batch_size: 8}\n"
        "network: {factory: 'own_nets:small', arguments: {width: 5}}\nthreats: {linf: 0.05, l2: 0.2, l1: 0.4}\n"
    )
    commands = [
        ["train", "e.yaml", "--out", "run", "--quiet"],
        ["certify", "run", "--samples", "6", "--out", "store", "--nodes", "20", "--quiet"],
        ["export", "run", "--onnx", "net.onnx"],
    ]
    code = f"from cure_ray.cli import app\nfor words in {commands}:\n    app(words, standalone_mode=False)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "union" in done.stdout
    network = load_checkpoint("run").network
    assert network.state_dict()["stem.0.weight"].shape[0] == 5
    session = onnxruntime.InferenceSession("net.onnx", providers=["CPUExecutionProvider"])
    x = torch.rand(4, 1, 6, 6)
    with torch.no_grad():
        assert np.allclose(session.run(None, {"input": x.numpy()})[0], network(x).numpy(), atol=1e-4)


def test_describing_an_experiment_runs_nothing(project: Path) -> None:
    (project / "noisy.py").write_text("raise RuntimeError('this ran')\ndef make():\n    pass\n")
    described = experiment("noisy:make")
    assert described.network.name == "make"
    assert resolve(yaml.safe_load(dump_experiment(described))) == described
    assert "noisy" not in sys.modules
    (project / "noisy.py").unlink()
    assert resolve(yaml.safe_load(dump_experiment(described))).config_hash == described.config_hash


def test_the_hash_goes_by_source_and_arguments_not_by_the_name_of_the_module(project: Path) -> None:
    first = experiment().config_hash
    assert experiment(arguments={"width": 5}).config_hash != first
    (project / "renamed.py").write_text(NETS)
    assert experiment("renamed:small").config_hash == first
    (project / "unrelated.py").write_text("x = 1")
    assert experiment().config_hash == first
    (project / "shapes" / "sizes.py").write_text("def hidden():\n    return 9\n")
    assert experiment().config_hash != first, "a helper the factory imports is part of it"
    (project / "shapes" / "sizes.py").write_text("def hidden():\n    return 8\n")
    assert experiment().config_hash == first
    (project / "own_nets.py").write_text(NETS + "\nother = 1\n")
    assert experiment().config_hash != first


def test_the_hash_does_not_depend_on_the_working_directory(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = experiment()
    monkeypatch.syspath_prepend(str(project))
    (project / "sub").mkdir()
    monkeypatch.chdir(project / "sub")
    (project / "sub" / "mine.npz").symlink_to(project / "mine.npz")
    assert experiment().config_hash == first.config_hash


def test_a_run_whose_code_changed_is_refused(project: Path) -> None:
    train_run(experiment(), project / "run", quiet=True)
    assert load_checkpoint(project / "run").epoch == 3
    (project / "own_nets.py").write_text(NETS.replace("stride=2", "stride=1"))
    with pytest.raises(UserError, match="not what this experiment was made with"):
        load_checkpoint(project / "run")


def test_code_from_outside_the_working_directory_must_be_allowed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = experiment()
    monkeypatch.syspath_prepend(str(project))
    (project / "sub").mkdir()
    monkeypatch.chdir(project / "sub")
    with pytest.raises(UserError, match=r"outside the working directory.*--allow-code own_nets"):
        new_network(described)
    assert "own_nets" not in sys.modules
    allow_code(["own_nets"])
    assert new_network(described).num_classes == 3


@pytest.mark.parametrize("factory", ["os:system", "subprocess:run", "torch.hub:load", "builtins:eval"])
def test_an_experiment_cannot_call_what_is_installed(project: Path, factory: str) -> None:
    with pytest.raises(UserError, match=r"outside the working directory|no Python source"):
        new_network(experiment(factory, {"command": f"touch {project}/pwned"}))
    assert not (project / "pwned").exists()


def test_a_file_cannot_lend_its_name_to_a_module_of_the_library(project: Path) -> None:
    """colorsys is imported before: a file of that name makes the working directory look like its home."""
    import colorsys

    assert colorsys.__file__ is not None
    (project / "colorsys.py").write_text("def rgb_to_hsv():\n    pass\n")
    with pytest.raises(UserError, match="hidden by another module"):
        load_factory("colorsys:rgb_to_hsv")


ODD = """
from torch import nn
from torch.nn.utils import parametrizations
from cure_ray.networks.models import Normalize

def body(*middle, out=3, first=None):
    return nn.Sequential(first or nn.Conv2d(1, 2, 3, padding=1), *middle, nn.ReLU(), nn.Flatten(), nn.Linear(72, out))

def pool():
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3))

def tanh():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.Tanh(), nn.Linear(4, 3))

def group():
    return body(nn.GroupNorm(1, 2))

def dropout():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 3))

def spectral():
    return nn.Sequential(nn.Flatten(), parametrizations.spectral_norm(nn.Linear(36, 4)), nn.ReLU(), nn.Linear(4, 3))

def momentum():
    return body(nn.BatchNorm2d(2, momentum=None))

def plain_norm():
    return body(nn.BatchNorm2d(2, affine=False))

def hooked():
    network = body()
    network[0].register_forward_hook(lambda module, args, out: 2 * out)
    return network

def twice():
    shared = nn.Linear(36, 36)
    return nn.Sequential(nn.Flatten(), shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(36, 3))

def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))

def classes():
    return body(out=4)

def shape():
    return body(first=nn.Conv2d(3, 2, 3, padding=1))

def double():
    return body().double()

def module():
    class Net(nn.Module):
        pass
    return Net()

def broken():
    raise KeyError("nothing here")

value = 3
"""
SAYS = {
    "pool": r"layer 2 \(MaxPool2d\).*use a convolution with a stride.*a network is: Normalize if any",
    "tanh": r"layer 2 \(Tanh\).*use ReLU",
    "group": r"layer 1 \(GroupNorm\).*use BatchNorm",
    "dropout": r"layer 3 \(Dropout\).*leave it out in training",
    "spectral": r"layer 1 \(ParametrizedLinear\).*not understood",
    "momentum": "momentum that is a number",
    "plain_norm": "affine=True",
    "hooked": r"0 \(Conv2d\) has hooks",
    "twice": "stands twice",
    "linear": "at least one hidden layer",
    "classes": r"\(4,\) outputs per image; the data set has 3 classes",
    "shape": r"does not accept images of shape \(1, 6, 6\)",
    "double": "not float32",
    "module": "returned Net.*torch.nn.Sequential",
    "broken": r"broken\(\) raised KeyError: 'nothing here'",
    "value": "no function 'value'",
    "missing": "no function 'missing'",
}


@pytest.mark.parametrize("function", SAYS)
def test_what_cannot_be_trained_is_refused_by_name(project: Path, function: str) -> None:
    (project / "odd.py").write_text(ODD)
    with pytest.raises(UserError, match=SAYS[function]) as caught:
        new_network(experiment(f"odd:{function}"))
    assert f"odd:{function}" in str(caught.value)


@pytest.mark.parametrize(
    ("network", "says"),
    [
        ({"factory": "own_nets"}, "package.module:factory"),
        ({"factory": "no_such:thing"}, "no Python source of no_such"),
        ({"factory": "own_nets:small", "width": 2.0}, "width has no effect with network.factory"),
        ({"arguments": {"width": 2}}, "belong to network.factory"),
        ({"name": "resnet"}, "network.name: unknown network"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(project: Path, network: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve({"network": network})
    assert says in str(caught.value)


def test_an_override_of_the_factory_forgets_what_was_written_about_another(project: Path) -> None:
    (project / "e.yaml").write_text(dump_experiment(experiment(arguments={"width": 5})))
    (project / "renamed.py").write_text(NETS.replace("return nn.Seq", "return  nn.Seq"))
    other = load_experiment(project / "e.yaml", ["network.factory=renamed:small"])
    assert other.network.arguments is None
    assert other.network.code == experiment("renamed:small").network.code
    same = load_experiment(project / "e.yaml", ["network.arguments.width=6"])
    assert same.network.arguments == {"width": 6}


def test_a_network_that_is_refused_leaves_no_run_behind(project: Path) -> None:
    (project / "odd.py").write_text(ODD)
    with pytest.raises(UserError, match="MaxPool2d"):
        train_run(experiment("odd:pool"), project / "run", quiet=True)
    assert not (project / "run").exists()


SWEEP = """
name: own
base:
  preset: smoke
  dataset: {path: mine.npz, validation: 12}
  network: {factory: "own_nets:small"}
  threats: {linf: 0.05, l2: 0.2, l1: 0.4}
  training: {method: max, batch_size: 8, epochs: 2, standard_epochs: 0, anneal_epochs: 1, lr_milestones: []}
  execution: {device: cpu}
space: {network.arguments.width: {grid: [3]}}
search: grid
samples: 4
"""


def test_a_sweep_keeps_what_its_images_and_code_were(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "s.yaml").write_text(SWEEP)
    first = load_sweep("s.yaml")
    (project / "again.yaml").write_text(yaml.safe_dump(first.model_dump(mode="json", by_alias=True)))
    assert load_sweep("again.yaml").identity == first.identity
    inside = experiment_at(first, {"network.arguments.width": 3}, 0, 0)
    (project / "sub").mkdir()
    monkeypatch.chdir(project / "sub")  # a trial's process has a working directory of its own
    assert experiment_at(first, {"network.arguments.width": 3}, 0, 0) == inside
    monkeypatch.chdir(project)
    (project / "own_nets.py").write_text(NETS + "\nother = 1\n")
    assert load_sweep("s.yaml").identity != first.identity
    (project / "own_nets.py").write_text(NETS)
    (project / "data").mkdir()
    (project / "mine.npz").rename(project / "data" / "mine.npz")
    (project / "s.yaml").write_text(SWEEP.replace("mine.npz", "data/mine.npz"))
    assert load_sweep("s.yaml").identity == first.identity


def test_a_sweep_trains_own_networks_on_own_images(project: Path) -> None:
    (project / "s.yaml").write_text(SWEEP)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "cure_ray", "sweep", "s.yaml", "--out", "out", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "best of 1 finished trials" in done.stdout
    widths = {load_checkpoint(run).network.state_dict()["stem.0.weight"].shape[0] for run in (project / "out" / "trials").glob("*/seed0")}
    assert widths == {3}


def test_a_job_takes_the_code_of_its_network_along_or_says_what_is_missing(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_code("own_nets:small", project)
    (project / "sweeps").mkdir()
    with pytest.raises(UserError, match=r"the job ships .*sweeps: put its module there"):
        check_code("own_nets:small", project / "sweeps")
    with pytest.raises(UserError, match="--allow-code subprocess"):
        check_code("subprocess:run", project)
    assert entrypoint(project / "s.yaml", project, None, None, ["my.nets"]).endswith("--allow-code my.nets")
