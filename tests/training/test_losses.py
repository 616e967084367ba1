"""Objectives and bound alignment: the identities between methods, and the empty subset."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cure_ray.config import Training
from cure_ray.training import losses


def bounds(seed: int, n: int = 6, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """u with 0 at the label, and the labels."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=rng)
    u = torch.randn(n, classes, generator=rng).mul(2).sub(1)
    return u.scatter(1, y[:, None], 0.0), y


def one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def test_robust_cross_entropy_of_exact_margins_is_cross_entropy() -> None:
    logits, y = torch.randn(8, 5), torch.randint(5, (8,))
    u = logits - logits.gather(1, y[:, None])
    assert torch.allclose(losses.robust_cross_entropy(u), F.cross_entropy(logits, y, reduction="none"), atol=1e-6)


@given(st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_joint_max_and_random_reduce_to_the_single_norms(seed: int) -> None:
    a, b = torch.rand(7, generator=torch.Generator().manual_seed(seed)), torch.rand(7, generator=torch.Generator().manual_seed(seed + 1))
    assert float(losses.joint([a, b], 1, [1.0, 0.0])) == pytest.approx(float(losses.single([a], 1)))
    assert float(losses.joint([a, b], 1, [0.0, 1.0])) == pytest.approx(float(losses.single([b], 1)))
    worst = float(losses.maximum([a, b], 1))
    assert worst >= max(float(a.mean()), float(b.mean())) - 1e-6
    assert worst <= float(a.mean()) + float(b.mean()) + 1e-6
    assert float(losses.parts([a], 1, False)) == pytest.approx(float(a.mean()))
    assert float(losses.parts([a, b], 1, True)) == pytest.approx((float(a.mean()) + float(b.mean())) / 2)


def test_three_norms_share_the_joint_weight() -> None:
    a, b, c = (torch.full((3,), v) for v in (1.0, 10.0, 100.0))
    training = Training(method="joint", norms=("linf", "l2", "l1"), alpha=0.5)
    assert float(losses.joint([a, b, c], 1, training.joint_weights)) == pytest.approx(0.5 + 2.5 + 25)


def test_a_norm_of_weight_zero_is_not_even_attacked() -> None:
    assert Training(method="joint", alpha=0.0).active_norms == ("linf",)
    assert Training(method="joint", alpha=1.0).active_norms == ("l2",)


def test_on_a_tie_the_first_norm_gets_the_whole_gradient() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    losses.maximum([a, b], 1).backward()
    assert a.grad is not None
    assert a.grad.tolist() == [0.5, 0.5]
    assert b.grad is None or b.grad.tolist() == [0.0, 0.0]


@given(st.integers(0, 10**6), st.sampled_from(["first", "second", "both", "all"]))
@settings(max_examples=50, deadline=None)
def test_alignment_is_non_negative_and_zero_for_equal_boxes(seed: int, subset: str) -> None:
    (u, _), (v, _) = bounds(seed), bounds(seed + 1)
    value, size = losses.bound_alignment(u, v, subset, one)
    assert float(value) >= -1e-6
    assert 0 <= float(size) <= len(u)
    assert float(losses.bound_alignment(u, u, subset, one)[0]) == pytest.approx(0.0, abs=1e-6)


def test_alignment_averages_the_kl_divergence_over_the_certified_subset() -> None:
    (u, _), (v, _) = bounds(0, 40), bounds(1, 40)
    gamma = (u <= 0).all(1)
    assert 0 < int(gamma.sum()) < 40
    value, size = losses.bound_alignment(u, v, "first", one)
    p, q = u.softmax(1), v.softmax(1)
    expected = (p * (p.log() - q.log())).sum(1)[gamma].mean()
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    assert int(size) == int(gamma.sum())
    assert float(losses.bound_alignment(u, v, "second", one)[1]) == int((v <= 0).all(1).sum())


def test_alignment_has_a_direction_and_a_gradient_on_both_sides() -> None:
    (u, _), (v, _) = bounds(0, 40), bounds(1, 40)
    forward, backward = (float(losses.bound_alignment(a, b, "all", one)[0]) for a, b in ((u, v), (v, u)))
    assert abs(forward - backward) > 1e-3
    u.requires_grad_()
    v.requires_grad_()
    losses.bound_alignment(u, v, "all", one)[0].backward()
    assert u.grad is not None
    assert v.grad is not None
    assert float(u.grad.abs().sum()) > 0
    assert float(v.grad.abs().sum()) > 0


def test_an_empty_subset_gives_exactly_zero_and_no_gradient() -> None:
    u = torch.tensor([[0.0, 1.0], [2.0, 0.0]], requires_grad=True)
    v = torch.tensor([[0.0, 3.0], [1.0, 0.0]], requires_grad=True)
    value, size = losses.bound_alignment(u, v, "first", one)
    value.backward()
    assert float(value.detach()) == 0
    assert float(size) == 0
    assert u.grad is not None
    assert v.grad is not None
    assert float(u.grad.abs().sum() + v.grad.abs().sum()) == 0


def test_permuting_the_classes_changes_nothing() -> None:
    (u, _), (v, _) = bounds(0, 20), bounds(1, 20)
    order = torch.randperm(u.shape[1])
    value, _ = losses.bound_alignment(u, v, "first", one)
    permuted, _ = losses.bound_alignment(u[:, order], v[:, order], "first", one)
    assert float(value) == pytest.approx(float(permuted), rel=1e-5)
