"""Bad options, data and weights of `cure-ray certify`: each gets a sentence, and nothing is written."""

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import cure_ray
from cure_ray.cluster.session import session
from cure_ray.commands.certify import certify
from cure_ray.errors import UserError
from cure_ray.testing import tiny

BAD: list[tuple[dict[str, Any], str]] = [
    ({"threats": "linf=-0.1"}, "finite number >= 0"),
    ({"threats": "l2=nan"}, "finite number >= 0"),
    ({"threats": "l3=0.1"}, "unknown norm"),
    ({"threats": "linf:0.1"}, "not like linf=0.1"),
    ({"threats": "linf=0.1,linf=0.2"}, "one radius per norm"),
    ({"threats": None}, "which threats"),
    ({"stages": "crwn"}, "Did you mean 'crown'"),
    ({"stages": "ibp,branch-and-bound", "nodes": 0}, "--budget 10s"),
    ({"budget": "soon"}, "not a time"),
    ({"engine": "natve"}, "Did you mean 'native'"),
    ({"network": "cure_ray.testing.tiny"}, "package.module:factory"),
    ({"network": "cure_ray.testing.tiny:nothing"}, "has no function 'nothing'"),
    ({"network": "no_such_module:f"}, "cannot import"),
    ({"network": "cure_ray.testing.tiny:digits"}, "not a torch module"),
    ({"weights": Path("nowhere.safetensors")}, "no such file"),
    ({"data": None}, "needs --data"),
    ({"data": Path("nowhere.npz")}, "no such file"),
    ({"network": None}, "either a CHECKPOINT"),
    ({"device": "gpu"}, "unknown device"),
    ({"threats": "linf"}, "write it out, like linf=0.1"),
    ({"threats": "R(10)", "stages": "crown,alpha-crown"}, "decided by the stages ibp, crown-ibp, attack"),
    ({"threats": "patch=2x2", "stages": "crown-ibp"}, "decided by the stages ibp, attack, and none of them"),
    ({"threats": "R(10)", "stages": "crown-ibp", "separate_logits": True}, "decided by the stages ibp, attack, and none"),
    ({"split": "validation"}, "certified as it is"),
    ({"seed": 10**30}, "must fit into 64 bits"),
    ({"nodes": 10**30}, "at most .* nodes"),
    ({"threads": 10**13}, "at most .* threads"),
    ({"domain": "\uff10,1"}, "is not a domain"),
    ({"budget": "\uff11s"}, "not a time"),
    ({"network": "bad_factories:raises"}, "KeyError: 'a table that is missing'"),
    ({"network": "bad_syntax:make"}, "importing bad_syntax failed .SyntaxError"),
]


@pytest.mark.parametrize(("change", "sentence"), BAD, ids=[s for _, s in BAD])
def test_bad_options_get_a_sentence(
    foreign: dict[str, Any], change: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_factories.py").write_text("def raises():\n    return {}['a table that is missing']\n")
    (tmp_path / "bad_syntax.py").write_text("def make(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=sentence):
        certify(**{**foreign, **change})
    assert not Path(foreign["out"]).exists()


@pytest.mark.parametrize(
    ("images", "labels", "sentence"),
    [
        (np.full((2, 1, 8, 8), 200.0), np.array([0, 1]), "Divide by 255"),
        (np.full((2, 1, 8, 8), -0.4, dtype=np.float32), np.array([0, 1]), "Undo the normalisation"),
        (np.full((2, 1, 8, 8), 0.1), np.array([0, 1]), "float32 cannot hold"),
        (np.zeros((2, 1, 9, 9)), np.array([0, 1]), r"shape \(1, 8, 8\), the data has \(1, 9, 9\)"),
        (np.zeros((2, 64)), np.array([0, 1]), r"\(N, C, H, W\)"),
        (np.zeros((2, 1, 8, 8)), np.array([0, 10]), r"labels must lie in 0\.\.9"),
        (np.zeros((2, 1, 8, 8)), np.array([0.0, 1.0]), "labels must be 2 integers"),
        (np.zeros((2, 1, 8, 8), dtype=np.int64), np.array([0, 1]), "uint8 or floats"),
        (np.zeros((0, 1, 8, 8)), np.zeros(0, dtype=np.int64), "no images"),
    ],
)
def test_bad_data_gets_a_sentence(foreign: dict[str, Any], images: Any, labels: Any, sentence: str) -> None:
    np.savez(foreign["data"], images=images, labels=labels)
    with pytest.raises(UserError, match=sentence):
        certify(**foreign)


def test_weights_with_nan_and_pickled_code_are_refused(foreign: dict[str, Any], tmp_path: Path) -> None:
    state = {k: v.clone() for k, v in tiny.network().state_dict().items()}
    state["4.weight"][0, 0] = float("nan")
    save_file(state, tmp_path / "nan.safetensors")
    for engine in ("native", "auto_lirpa"):
        with pytest.raises(UserError, match=r"(?i)nan"):
            certify(**{**foreign, "weights": tmp_path / "nan.safetensors"}, engine=engine)
    torch.save(tiny.network(), tmp_path / "whole_module.pt")
    with pytest.raises(UserError, match="need code to be run"):
        certify(**{**foreign, "weights": tmp_path / "whole_module.pt"})
    torch.save(tiny.network().state_dict(), tmp_path / "plain.pt")
    certify(**{**foreign, "weights": tmp_path / "plain.pt"}, samples=2, stages="ibp")


def test_images_with_channels_last_are_refused_unless_the_network_says_they_are_meant() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(8 * 8 * 3, 10)).eval()  # flat, so it takes either order
    images, labels = torch.zeros(2, 8, 8, 3), torch.tensor([0, 1])
    with pytest.raises(UserError, match=r"looks like height, width, channels.*transpose\(0, 3, 1, 2\)"):
        cure_ray.certify(network, images, labels, "linf=0.01", quiet=True)
    network.input_shape = (8, 8, 3)
    assert len(cure_ray.certify(network, images, labels, "linf=0.01", quiet=True).verdicts) == 2
    vectors = nn.Sequential(nn.Flatten(), nn.Linear(20, 10)).eval()
    assert len(cure_ray.certify(vectors, torch.zeros(2, 20, 1, 1), labels, "linf=0.01", quiet=True).verdicts) == 2


def test_missing_arrays_are_named(foreign: dict[str, Any]) -> None:
    np.savez(foreign["data"], images=np.zeros((2, 1, 8, 8)), y=np.array([0, 1]))
    with pytest.raises(UserError, match="needs the arrays labels, has images, y"):
        certify(**foreign)


def test_more_samples_than_there_are_is_said(foreign: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    certify(**foreign, samples=1000, stages="ibp")
    assert "1000 samples were asked for; data has 24, all of which are certified" in capsys.readouterr().err


def test_a_refusal_says_whether_rounding_or_a_hook_is_to_blame() -> None:
    """Both make the compiled network differ from the float32 one; only the hook is something the engine cannot see."""
    images, labels = torch.rand(2, 1, 8, 8), torch.tensor([0, 1])
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)).eval()
    with torch.no_grad():
        network[1].bias.add_(1e8)
        network[3].bias.sub_(1e8 * network[3].weight.sum(1))
    with pytest.raises(UserError, match=r"loses its outputs to rounding.*Large terms cancel"):
        cure_ray.certify(network, images, labels, "linf=0.01", quiet=True)
    hooked = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()
    hooked[1].register_forward_hook(lambda module, given, out: out + 1)
    with pytest.raises(UserError, match="hook"):
        cure_ray.certify(hooked, images, labels, "linf=0.01", quiet=True)


def test_a_dead_address_is_said_before_ray_waits_for_it() -> None:
    with socket.socket() as bound:  # bound and not listening: nobody else can take the port
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        for given in (address, f"ray://{address}"):
            with pytest.raises(UserError, match=r"no Ray cluster could be reached .*refused"), session(given):
                pass
