"""One compact check of whose certificate it is: keys that hold all a verdict depends on, networks by what they compute, checkpoints.

Imports of cure_ray happen inside the functions: the mutation test runs them against altered copies of the package.
"""

import tempfile
from dataclasses import fields, replace
from pathlib import Path

import torch
from soundness_networks import designed_network
from soundness_results import make_job, refused
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


def check_keys() -> None:
    """Whatever can change a verdict changes the name of the run; sizes of batches do not; a key reads back as it was written."""
    from cure_ray.attacks import AttackSettings
    from cure_ray.certification.job import CascadeSettings, Job, Shard
    from cure_ray.threats.balls import Ball
    from cure_ray.threats.box import Box
    from cure_ray.threats.transformations import parse_transformation

    job, base = make_job(), CascadeSettings(("ibp", "attack", "crown"))
    changes = {
        "stages": ("ibp",), "seconds": 1.0, "nodes": 7, "attack": AttackSettings(3), "box": Box(-1.0, 1.0), "patch_precheck": True,
        "separate_logits": True,
    }  # fmt: skip
    assert set(changes) | {"batch"} == {f.name for f in fields(CascadeSettings)}
    settings = [base, *(replace(base, **{name: value}) for name, value in changes.items())]
    settings += [replace(base, attack=a) for a in (AttackSettings(restarts=3), AttackSettings(vertices=2))]
    assert len({replace(job, settings=s).run_id for s in settings}) == len(settings), "settings that share a run"
    for same in (replace(base, batch=3), replace(base, attack=AttackSettings(rows=5))):
        assert replace(job, settings=same).run_id == job.run_id
    for one in settings:
        assert CascadeSettings.of(one.key()) == one
    others = {
        "checkpoint_digest": "b" * 64, "dataset": "x", "split": "train", "data_digest": "e" * 64, "engine": "e", "engine_version": "2",
        "settings": settings[1], "seed": 1, "union_only": True, "engine_options": '{"a": 1}', "program": "0",
    }  # fmt: skip
    assert set(others) == {f.name for f in fields(Job)}
    jobs = [job, *(replace(job, **{name: value}) for name, value in others.items())]
    assert len({j.run_id for j in jobs}) == len(jobs), "jobs that share a run"
    for one in jobs:
        assert Job.of(one.key()) == one
    turn = parse_transformation("R(10)")
    shards = [
        Shard(job, (Ball("l2", 0.5),), (1, 2)), Shard(job, (Ball("l2", 0.5 + 1e-12),), (1, 2)), Shard(job, (Ball("l1", 0.5),), (1, 2)),
        Shard(job, (Ball("l2", 0.5),), (1, 3)), Shard(job, (Ball("l2", 0.5),), (1, 4, 2)), Shard(jobs[1], (Ball("l2", 0.5),), (1, 2)),
        Shard(job, (turn,), (1, 2)), Shard(job, (turn.cut("7"),), (1, 2)), Shard(job, (Ball("l2", 0.5), Ball("l1", 0.5)), (1, 2)),
    ]  # fmt: skip
    assert len({s.name for s in shards}) == len(shards), "shards that share a name"
    for bad in (
        {"stages": ()},
        {"stages": ("crwn",)},
        {"seconds": -1.0},
        {"nodes": -1},
        {"batch": 0},
        {"seconds": float("nan")},
        {"nodes": 2**63},
        {"attack": AttackSettings(begun=2)},  # a part of an attack under the name of the whole
    ):
        refused(lambda b=bad: replace(base, **b))
    assert CascadeSettings(("crown", "ibp")).stages == ("ibp", "crown")
    assert replace(base, batch=1, nodes=0, box=True) == replace(base, batch=1, nodes=0, box=Box(0.0, 1.0))
    assert replace(base, nodes=2**63 - 1, seconds=0.0).nodes == 2**63 - 1


def _network(std: float = 1.0, stride: int = 1, eps: float = 1e-5, weight: float = 1.0, name: str = "a") -> nn.Module:
    from cure_ray.networks.models import Normalize

    torch.manual_seed(0)
    side = 4 if stride == 1 else 7
    network = nn.Sequential(Normalize([0.1], [std]), nn.Conv2d(1, 2, 3, stride), nn.BatchNorm2d(2, eps), nn.ReLU(), nn.Flatten())
    network.add_module(name, nn.Linear(2 * ((side - 3) // stride + 1) ** 2, 3))
    with torch.no_grad():
        network[1].weight[0, 0, 0, 0] = weight
    return network.eval()


class _Forward(nn.Module):
    """The same layers, another way to call them."""

    def __init__(self, how: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.first, self.last = how, nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.flatten(x, 1)
        h = self.first(h) if self.how != 1 else self.first(h) * 2.0
        h = torch.relu(h) if self.how != 2 else torch.tanh(h)
        h = h.abs() if self.how == 4 else h.neg() if self.how == 5 else h * 3.0 if self.how == 6 else h * 4.0 if self.how == 11 else h
        h = h.sum(1, keepdim=True).expand(-1, 4) if self.how == 7 else h.sum(dim=1, keepdim=True).expand(-1, 4) if self.how == 8 else h
        h = torch.sum(h, dim=0, keepdim=True) if self.how == 9 else torch.sum(h, dim=1, keepdim=True) if self.how == 10 else h
        return self.last(h) if self.how != 3 else self.last(h) - torch.tensor([0.5, 0.0])


class _Scaled(nn.Module):
    """A parameter of its own, used without a layer."""

    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.flatten(x, 2) * self.scale


class _Called(nn.Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) + 1


def check_networks() -> None:
    """Networks that compute different functions have different identities; names of submodules and the process have no say."""
    from cure_ray.certification.identity import network_identity

    plain = network_identity(_network())
    assert network_identity(_network()) == plain
    assert network_identity(_network(name="b")) == plain
    different = [_network(std=0.5), _network(stride=2), _network(eps=1e-3), _network(weight=2.0), *(_Forward(i).eval() for i in range(12))]
    different += [_Scaled(torch.ones(2, 1)).eval(), _Scaled(torch.ones(1, 2)).eval(), _Scaled(torch.full((1, 2), 2.0)).eval()]
    different += [nn.Sequential(nn.Flatten(), layer).eval() for layer in (nn.Tanh(), nn.Sigmoid())]
    assert len({plain, *(network_identity(n) for n in different)}) == len(different) + 1, "two functions with one identity"
    moved = _network()
    moved[2].running_mean.add_(1e-3)
    assert network_identity(moved) != plain
    training = _network()
    training[2].train()
    assert network_identity(training) != plain
    constant = _Forward(3).eval()
    before = set(vars(constant))
    network_identity(constant)
    assert set(vars(constant)) == before, "the tracer left something behind"
    hooked = _network()
    hooked[1].register_forward_hook(lambda module, given, out: out + 1)
    refused(lambda: network_identity(hooked), "has a forward hook")
    inside = _network()
    inside[1].register_forward_pre_hook(lambda module, given: None)
    refused(lambda: network_identity(inside), "has a forward hook")
    for register in (register_module_forward_hook, register_module_forward_pre_hook):
        handle = register(lambda *given: None)
        try:
            refused(lambda: network_identity(_network()), "global forward hook")
        finally:
            handle.remove()
    replaced = _network()
    replaced[3].forward = lambda x: x
    refused(lambda: network_identity(replaced), "had its forward replaced")
    refused(lambda: network_identity(nn.Sequential(nn.Flatten(), _Called(4, 2)).eval()), "defines __call__")
    refused(lambda: network_identity(torch.jit.script(nn.Sequential(nn.Linear(4, 2)).eval())), "TorchScript")
    holding = nn.Linear(4, 2)
    holding.inner = _Forward(0)
    refused(lambda: network_identity(nn.Sequential(nn.Flatten(), holding).eval()), "hidden inside a layer of torch")
    refused(lambda: network_identity(nn.Sequential(nn.Flatten(), nn.Linear(4, 2, device="meta")).eval()), "without plain numbers")
    refused(lambda: network_identity(_Scaled(torch.ones(1, 2).to_sparse()).eval()), "without plain numbers")
    assert network_identity(torch.fx.symbolic_trace(_network())) == network_identity(torch.fx.symbolic_trace(_network()))

    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    refused(lambda: network_identity(nn.Sequential(nn.Flatten(), Branching()).eval()))


def check_data() -> None:
    from cure_ray.data.samples import Samples

    base = Samples("digits", "test", torch.arange(8.0).view(2, 1, 2, 2) / 8, torch.tensor([0, 1]))
    pixel = base.images.clone()
    pixel[1, 0, 1, 1] += 1e-7
    others = [
        replace(base, images=pixel), replace(base, labels=torch.tensor([1, 0])), replace(base, images=base.images.view(2, 1, 1, 4)),
        replace(base, images=base.images.flip(0)),
    ]  # fmt: skip
    assert len({s.digest for s in [base, *others]}) == 5, "other data with the same digest"
    assert replace(base, file=Path("elsewhere")).digest == base.digest


def check_checkpoints() -> None:
    """A checkpoint comes back as it was written, or not at all; the newest that is whole is found."""
    from safetensors.torch import load_file, save_file

    from cure_ray.config import load_experiment
    from cure_ray.networks.build import new_network
    from cure_ray.runs.checkpoints import load_checkpoint, newest_intact, state_digest, write_checkpoint

    experiment = load_experiment("smoke")
    torch.manual_seed(0)
    state = {k: v + 1 for k, v in new_network(experiment).state_dict().items()}  # nothing a new network has by itself
    name = next(k for k, v in state.items() if v.dim() > 1)
    variants = [state, {**state, name: state[name] + 1e-6}, {f"{k}x": v for k, v in state.items()}, {**state, name: state[name].double()}]
    variants.append({**state, name: state[name].flatten()})
    assert len({state_digest(v) for v in variants}) == len(variants)
    assert state_digest(dict(reversed(state.items()))) == state_digest(state)
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / "checkpoints" / f"epoch_{n:04d}" for n in (1, 2)]
        places[0].parent.mkdir()
        for epoch, place in enumerate(places, 1):
            moment = {"step": torch.ones(1) * epoch}
            assert write_checkpoint(place, experiment, epoch, state, {"ct": moment}, {"loss": 1.0}) == state_digest(state)
        loaded = load_checkpoint(places[1])
        assert (loaded.epoch, loaded.digest, loaded.network.training) == (2, state_digest(state), False)
        assert all(torch.equal(v, state[k]) for k, v in loaded.network.state_dict().items())
        assert float(loaded.optimizer("ct")["step"]) == 2
        assert loaded.optimizer("nt") is None
        assert newest_intact(Path(folder)).epoch == 2
        weights, optimizer = places[1] / "weights.safetensors", places[1] / "optimizer_ct.safetensors"
        for victim in (weights, optimizer):
            whole = victim.read_bytes()
            victim.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            refused(lambda: load_checkpoint(places[1]), "digest differs")
            assert newest_intact(Path(folder)).epoch == 1
            victim.unlink()
            refused(lambda: load_checkpoint(places[1]), "is missing")
            victim.write_bytes(whole)
        _check_meta(places[1], weights, load_file, save_file, load_checkpoint)


def _check_meta(place: Path, weights: Path, load_file: object, save_file: object, load_checkpoint: object) -> None:
    """What the description says is compared too: a file that is consistent in itself but not with it is no checkpoint."""
    import hashlib
    import json

    meta = json.loads((place / "meta.json").read_text())

    def change(**what: object) -> None:
        (place / "meta.json").write_text(json.dumps({**meta, **what}))

    change(digest="0" * 64)
    refused(lambda: load_checkpoint(place), "do not match the digest")
    change(format="another")
    refused(lambda: load_checkpoint(place), "is not a checkpoint of this program")
    change(files={})
    refused(lambda: load_checkpoint(place), "lists no")
    change(files={**meta["files"], "../weights.safetensors": "0"})
    refused(lambda: load_checkpoint(place), "is missing")
    whole = load_file(weights)
    first = next(iter(whole))
    for wrong in ({k: v for k, v in whole.items() if k != first}, {**whole, "extra": torch.ones(1)}, {**whole, first: torch.ones(2, 3)}):
        save_file(wrong, weights)
        change(files={**meta["files"], "weights.safetensors": hashlib.sha256(weights.read_bytes()).hexdigest()})
        refused(lambda: load_checkpoint(place), "belongs to another architecture")


def check_cross_check() -> None:
    """Up to so many certificates, drawn at random; confirmed only where the smallest margin is positive; NaN confirms nothing."""
    from cure_ray.certification.crosscheck import cross_check
    from cure_ray.certification.job import CascadeSettings
    from cure_ray.data.samples import Samples
    from cure_ray.threats.balls import Ball

    images = torch.zeros(60, 1, 1, 2)
    images[:, 0, 0, 0] = torch.arange(60) / 100
    samples, asked = Samples("digits", "test", images, torch.zeros(60, dtype=torch.long)), list[object]()

    class Other:
        name, version, stages = "other", "1", ("ibp", "crown", "branch-and-bound")

        def problem(self, x: torch.Tensor, y: torch.Tensor, threat: object, box: object) -> list[int]:
            asked.append(box)
            return (100 * x[:, 0, 0, 0]).round().long().tolist()

        def margins(self, problem: list[int], stage: str) -> torch.Tensor:
            table = {0: [1.0, -1.0], 1: [1.0, 2.0], 2: [torch.nan, 1.0], 3: [0.0, 1.0]}
            rows = [table[n % 4] if stage == "ibp" or n % 8 < 4 else [0.5, 0.25] for n in problem]
            return torch.tensor(rows, dtype=torch.float64)

    settings, every = CascadeSettings(("ibp",)), list(range(60))
    found = cross_check(Other(), samples, Ball("l2", 0.5), every, settings, 0, 60)
    assert found.checked == tuple(every)
    assert found.confirmed == tuple(n for n in every if n % 4 == 1 or n % 8 >= 4), "confirmed without a proof, or not with one"
    assert [found.best[n] for n in (0, 1, 3, 4, 5)] == [-1.0, 1.0, 0.0, 0.25, 1.0]
    assert found.best[2] == -torch.inf
    assert all(box == settings.box for box in asked)
    drawn = [cross_check(Other(), samples, Ball("l2", 0.5), every, settings, seed, 10).checked for seed in (0, 1, 0)]
    assert drawn[0] == drawn[2] != drawn[1]
    assert all(len(set(d)) == 10 and list(d) == sorted(d) and d != tuple(range(10)) for d in drawn)
    odd = [n for n in every if n % 2]
    assert set(cross_check(Other(), samples, Ball("l2", 0.5), odd, settings, 0, 10).checked) <= set(odd)
    assert "NOT confirmed" in str(found)
    assert "NOT" not in str(cross_check(Other(), samples, Ball("l2", 0.5), [1, 5], settings, 0))


def check_guard() -> None:
    """A network the engine would not see as it is, is refused."""
    from cure_ray.bounds.native.engine import NativeEngine

    case = designed_network(0)
    NativeEngine(case.network, "cpu")
    case.network[1].register_forward_hook(lambda module, given, out: out + 1)
    refused(lambda: NativeEngine(case.network, "cpu"))


def check_identity() -> None:
    """Everything here: used on every mutant of keys, identities and checkpoints."""
    check_keys()
    check_networks()
    check_data()
    check_checkpoints()
    check_cross_check()
    check_guard()
