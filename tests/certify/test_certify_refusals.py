"""Bad options, data and weights of `cure-ray certify`: each gets a sentence, and nothing is written."""

from pathlib import Path
from typing import Any

import certify_tiny as tiny
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cure_ray.commands.certify import certify
from cure_ray.errors import UserError

BAD: list[tuple[dict[str, Any], str]] = [
    ({"threats": "linf=-0.1"}, "finite number >= 0"),
    ({"threats": "l2=nan"}, "finite number >= 0"),
    ({"threats": "l3=0.1"}, "unknown norm"),
    ({"threats": "linf:0.1"}, "not like linf=0.1"),
    ({"threats": "linf=0.1,linf=0.2"}, "one radius per norm"),
    ({"threats": None}, "which threats"),
    ({"stages": "crwn"}, "Did you mean 'crown'"),
    ({"stages": "ibp,branch-and-bound"}, "--budget 10s"),
    ({"budget": "soon"}, "not a time"),
    ({"engine": "natve"}, "Did you mean 'native'"),
    ({"network": "certify_tiny"}, "package.module:factory"),
    ({"network": "certify_tiny:nothing"}, "has no function 'nothing'"),
    ({"network": "no_such_module:f"}, "cannot import"),
    ({"network": "certify_tiny:digits"}, "not a torch module"),
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
]


@pytest.mark.parametrize(("change", "sentence"), BAD, ids=[s for _, s in BAD])
def test_bad_options_get_a_sentence(foreign: dict[str, Any], change: dict[str, Any], sentence: str) -> None:
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
