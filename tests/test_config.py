"""Experiments as data: round trips, overrides, and errors that name what would be right."""

from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cure_ray.config import METHODS, PRESETS, dump_experiment, load_experiment, resolve
from cure_ray.errors import UserError
from cure_ray.threats.norms import NORMS, P, contains


def described(preset: str, method: str, profile: str = "paper", **training: object) -> dict[str, object]:
    start = {"start_from": "somewhere"} if method == "finetune" else {}
    return {"preset": preset, "profile": profile, "training": {"method": method, **start, **training}}


@pytest.mark.parametrize("profile", ["paper", "authors"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_method_and_profile_survives_a_round_trip(preset: str, method: str, profile: str) -> None:
    experiment = resolve(described(preset, method, profile))
    again = resolve(yaml.safe_load(dump_experiment(experiment)))
    assert again == experiment
    assert again.config_hash == experiment.config_hash


@pytest.mark.parametrize(
    ("preset", "epochs", "first_full", "batches", "gp_epochs"),
    [
        ("mnist-small", 70, 22, 234, 49),
        ("mnist-large", 70, 22, 234, 49),
        ("cifar-small", 160, 82, 390, 79),
        ("cifar-large", 180, 82, 390, 99),
        ("tinyimagenet", 180, 82, 781, 99),
        ("cifar100", 160, 82, 390, 79),
    ],
)
def test_presets_have_the_papers_schedule(preset: str, epochs: int, first_full: int, batches: int, gp_epochs: int) -> None:
    experiment = load_experiment(preset)
    assert experiment.training.epochs == epochs
    assert experiment.training.first_full_epoch == first_full
    assert experiment.steps_per_epoch == batches
    assert experiment.training.epochs - experiment.training.first_full_epoch + 1 == gp_epochs


def test_radii_are_kept_as_exact_fractions() -> None:
    experiment = load_experiment("cifar-large")
    assert experiment.threats.linf == Fraction(8, 255)
    assert "linf: 8/255" in dump_experiment(experiment)
    assert experiment.threats.eps("linf") == 8 / 255


def test_authors_profile_overrides_only_what_their_code_does_differently() -> None:
    paper, authors = (resolve(described("mnist-small", "scratch", p)) for p in ("paper", "authors"))
    assert (paper.training.lr, authors.training.lr) == (1e-4, 5e-4)
    assert authors.training.align == ("l2", "linf")
    assert authors.training.attack.l2_project == "accumulate"
    assert authors.training_eps("l2") == 0.75
    assert authors.threats == paper.threats
    assert authors.training.epochs == paper.training.epochs
    fine = resolve(described("cifar-large", "finetune", "authors"))
    assert (fine.training.epochs, fine.training.anneal_epochs, fine.training.lr_milestones) == (36, 16, (28, 32))
    assert fine.training.uses_projection


def test_plain_baselines_carry_no_regulariser_in_either_profile() -> None:
    for profile in ("paper", "authors"):
        for method in ("natural", "l2_pgd"):
            training = resolve(described("mnist-small", method, profile)).training
            assert (training.l1_weight, training.warmup_weight) == (0.0, 0.0)
        assert resolve(described("mnist-small", "l2_pgd", profile)).network.init == "default"


def test_finetune_takes_a_fifth_of_the_epochs_at_full_radius() -> None:
    fine = resolve(described("mnist-small", "finetune"))
    assert (fine.training.epochs, fine.training.standard_epochs, fine.training.anneal_epochs) == (14, 0, 0)
    assert not fine.training.uses_projection


def test_scale_shrinks_epochs_ramp_and_milestones_together() -> None:
    small = load_experiment("cifar-large", ["scale=0.1"])
    assert (small.training.epochs, small.training.anneal_epochs, small.training.lr_milestones) == (18, 8, (14, 16))
    assert "scale 0.1" in small.origin


def test_overrides_accept_plain_scientific_notation(tmp_path: Path) -> None:
    assert load_experiment("smoke", ["training.lambda_2=1e-6"]).training.lambda_2 == 1e-6
    file = tmp_path / "e.yaml"
    file.write_text("preset: smoke\ntraining: {lambda_2: 1e-4}\n")
    assert load_experiment(file).training.lambda_2 == 1e-4


def test_names_placement_and_certification_do_not_change_the_identity() -> None:
    base = load_experiment("smoke")
    for same in ("name=other", "execution.threads=2", "certification.samples=7"):
        assert load_experiment("smoke", [same]).config_hash == base.config_hash
    for other in ("seed=1", "training.eta=1.0", "threats.l2=0.4", "network.width=0.5"):
        assert load_experiment("smoke", [other]).config_hash != base.config_hash


def test_threats_of_every_family_are_part_of_an_experiment(tmp_path: Path) -> None:
    file = tmp_path / "e.yaml"
    file.write_text('preset: smoke\ncertification: {threats: [linf, l2=1/4, R(10), "R(2),Sh(2)", patch=2x2, patch(1x3)]}\n')
    experiment = load_experiment(file)
    assert experiment.certification.threats == ("linf", "l2=1/4", "R(10)", "R(2),Sh(2)", "patch=2x2", "patch(1x3)")
    assert resolve(yaml.safe_load(dump_experiment(experiment))) == experiment
    assert experiment.config_hash == load_experiment("smoke").config_hash
    written = load_experiment("smoke", ["certification.threats='linf,R(2),Sh(2);patch=2x2'"])
    assert written.certification.threats == ("linf", "R(2),Sh(2)", "patch=2x2")
    assert load_experiment("smoke").certification.threats == ()


def test_a_transformation_in_an_experiment_is_refused_with_a_pointer_at_the_place() -> None:
    with pytest.raises(UserError) as caught:
        load_experiment("smoke", ["certification.threats=['linf', 'R(10),Q(2)']"])
    lines = str(caught.value).split("\n")
    assert "certification.threats: unknown transformation 'Q'" in lines[-3]
    assert lines[-2] == "  R(10),Q(2)"
    assert lines[-1].index("^") == lines[-2].index("Q")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("certification.threats=[linf=x]", "not like linf=0.1"),
        ("certification.threats=[l3=1]", "unknown norm"),
        ("certification.threats=[linf, linf=0.2]", "no threat twice"),
        ("certification.threats=[patch=9x9]", "larger than the image"),
        ("certification.threats=['C(2),R(2)']", "spatial ones"),
        ("certification.threats=[R(120)]", "90 degrees"),
        ("certification.threats=[2]", "valid string"),
        ("training.etta=1", "Did you mean 'eta'?"),
        ("trainig.eta=1", "Did you mean 'training'?"),
        ("training.eta=lots", "valid number"),
        ("training.method=linff", "Did you mean 'linf'?"),
        ("training.lambda_inf=1.5", "less than or equal to 1"),
        ("training.batch_size=5000", "exceeds the"),
        ("training.epochs=3", "the ramp ends after epoch"),
        ("training.lr_milestones=[9, 3]", "increasing"),
        ("threats.linf=8", "pixel units"),
        ("threats.l2=-1", "negative"),
        ("threats.l2=2/0", "8/255"),
        ("threats.l1=0.2", "lies inside"),
        ("threats.l2=0.05", "lies inside"),
        ("scale=0", "scale must be"),
        ("profile=autors", "Did you mean 'authors'?"),
        ("preset=mnist-smal", "Did you mean 'mnist-small'?"),
        ("training=5", "expected a mapping"),
        ("dataset.crop=56", "tinyimagenet only"),
        ("dataset.validation=1437", "no training image"),
        ("network.last_conv_stride=2", "belongs to cnn7"),
        ("name=../evil", "pattern"),
        ("training.eta", "key=value"),
        ("training.eta=[1", "not valid YAML"),
    ],
)
def test_bad_values_say_what_would_be_right(override: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        load_experiment("smoke", [override])
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ({"method": "max", "alpha": 0.3}, "alpha has no effect with method max"),
        ({"method": "linf", "eta": 1.0}, "eta has no effect with method linf"),
        ({"method": "l2", "norms": ["linf", "l1"]}, "norms has no effect"),
        ({"method": "max", "norms": ["linf"]}, "at least two norms"),
        ({"method": "max", "norms": ["linf", "linf"]}, "twice"),
        ({"method": "scratch", "align": ["linf", "l1"]}, "align needs two different norms"),
        ({"method": "finetune"}, "start_from"),
        ({"method": "natural", "loss": "mtl"}, "loss has no effect with method natural"),
        ({"method": "l2_pgd", "loss": {"l2": "mtl"}}, "loss has no effect with method l2_pgd"),
        ({"method": "cgt", "natural_weight": 0.5}, "natural_weight has no effect with method cgt"),
        ({"method": "linf", "loss": {"l2": "cc"}}, "loss.l2: cc has no effect, method linf trains linf"),
        ({"method": "max", "loss": {"linf": "mtl", "l1": "mtl"}}, "loss.l1: mtl has no effect, method max trains linf, l2"),
        ({"method": "max", "loss": "mtl-ibp"}, "Did you mean 'mtl'?"),
        ({"method": "max", "loss": {"linf": "expp"}}, "Did you mean 'exp'?"),
        ({"method": "max", "loss": {"l3": "mtl"}}, "unknown key"),
        ({"method": "max", "loss": ["mtl"]}, "training.loss"),
        ({"method": "max", "attack": {"radius": 2.0}}, "attack.radius has no effect with loss sabr"),
        ({"method": "max", "natural_weight": 1.0}, "less than 1"),
        ({"method": "max", "ema": 1.0}, "less than 1"),
        ({"method": "max", "weight_decay": -1}, "greater than or equal to 0"),
        ({"method": "max", "accumulate": 0}, "greater than or equal to 1"),
        ({"method": "max", "accumulate": 21}, "an epoch has 20 batches"),
        ({"method": "max", "ramp_bound": "crown"}, "Did you mean 'crown-ibp'?"),
        ({"method": "max", "ramp_bound": "crown-ibp", "anneal_epochs": 0}, "anneal_epochs is 0"),
    ],
)
def test_method_and_parameters_must_agree(training: dict[str, object], says: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve({"preset": "smoke", "training": training})
    assert says in str(caught.value)


def test_precise_statistics_need_batch_normalisation() -> None:
    with pytest.raises(UserError, match=r"network\.batch_norm is false"):
        load_experiment("smoke", ["training.precise_bn=true", "network.batch_norm=false"])


def test_one_word_sets_the_loss_of_every_norm_and_presets_keep_what_a_method_can_use() -> None:
    assert load_experiment("smoke", ["training.loss=mtl"]).training.loss.model_dump() == {"linf": "mtl", "l2": "mtl", "l1": "mtl"}
    assert load_experiment("smoke", ["training.method=linf", "training.loss=cc"]).training.loss.of("linf") == "cc"
    for method in ("natural", "l2_pgd", "cgt"):
        assert load_experiment("mmr-universal-mnist", [f"training.method={method}"]).training.loss.uniform


@pytest.mark.parametrize(
    ("preset", "method", "config_hash"),
    [
        ("smoke", "scratch", "97d2b20b0be29a8f"),
        ("mnist-small", "joint", "e040ecad86c87e09"),
        ("cifar-large", "natural", "d0f51662410ca79f"),
    ],
)
def test_experiments_of_earlier_versions_keep_their_hash(preset: str, method: str, config_hash: str) -> None:
    assert resolve(described(preset, method)).config_hash == config_hash


def test_switches_are_written_only_where_they_are_used() -> None:
    names = ("loss", "bounds", "natural_weight", "ramp_bound", "weight_decay", "accumulate", "ema", "precise_bn")
    plain = yaml.safe_load(dump_experiment(load_experiment("smoke")))
    assert not set(names) & set(plain["training"])
    used = [
        "training.loss=exp",
        "training.bounds=crown-ibp",
        "training.ema=0.99",
        "training.precise_bn=true",
        "training.accumulate=2",
        "training.weight_decay=0.01",
    ]
    for change in used:
        experiment = load_experiment("smoke", [change])
        assert experiment.config_hash != load_experiment("smoke").config_hash
        assert resolve(yaml.safe_load(dump_experiment(experiment))) == experiment


def test_files_that_are_not_experiments_are_refused(tmp_path: Path) -> None:
    for content, says in (("[1, 2]", "expected a mapping"), ("a: [", "not valid YAML"), ("seed: 1\nseed: 2", "appears twice")):
        file = tmp_path / "e.yaml"
        file.write_text(content)
        with pytest.raises(UserError, match=says):
            load_experiment(file)
    with pytest.raises(UserError, match="no such file"):
        load_experiment(tmp_path / "missing.yaml")


def test_yaml_cannot_run_code(tmp_path: Path) -> None:
    file = tmp_path / "e.yaml"
    file.write_text(f"name: !!python/object/apply:os.system ['touch {tmp_path}/pwned']")
    with pytest.raises(UserError, match="not valid YAML"):
        load_experiment(file)
    assert not (tmp_path / "pwned").exists()


@given(st.sampled_from(NORMS), st.sampled_from(NORMS), st.floats(0.01, 2), st.floats(0.01, 2), st.integers(1, 50), st.randoms())
def test_ball_containment_agrees_with_the_balls_extreme_points(inner, outer, inner_eps, outer_eps, d, rnd) -> None:  # type: ignore[no-untyped-def]
    """The farthest points of an l_p ball in another norm are its axis points and its corner points."""
    axis = inner_eps
    corner_coordinate = inner_eps * d ** (0.0 if P[inner] == float("inf") else -1 / P[inner])
    corner = corner_coordinate * (1.0 if P[outer] == float("inf") else d ** (1 / P[outer]))
    farthest = max(axis, corner)
    if abs(farthest - outer_eps) > 1e-9:
        assert contains(outer, outer_eps, inner, inner_eps, d) == (farthest <= outer_eps)
