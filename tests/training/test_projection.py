"""Gradient projection: the convex form, its edge values, and what it does with counters and variances."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cure_ray.training.projection import cosine, merge, merge_tensor


def states(seed: int, n: int = 3) -> list[dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    return [
        {
            "weight": torch.randn(4, 3, generator=rng),
            "running_var": torch.rand(4, generator=rng),
            "num_batches_tracked": torch.tensor(i + 5),
        }
        for i in range(n)
    ]


@given(st.integers(0, 10**6), st.floats(0.01, 1))
@settings(max_examples=60, deadline=None)
def test_the_convex_form_equals_the_update_form(seed: int, beta: float) -> None:
    start, natural, certified = (s["weight"].double() for s in states(seed))
    merged, similarity = merge_tensor(start, natural, certified, beta)
    update_n, update_c = natural - start, certified - start
    expected = float((update_n * update_c).sum() / (update_n.norm() * update_c.norm()))
    assert similarity == pytest.approx(expected, abs=1e-9)
    k = max(expected, 0)
    assert torch.allclose(merged, start + beta * k * update_n + (1 - beta) * update_c, atol=1e-6)


def test_conflicting_updates_keep_only_a_shortened_certified_step() -> None:
    start = torch.zeros(3)
    certified = torch.tensor([1.0, 2.0, 3.0])
    merged, similarity = merge_tensor(start, -certified, certified, 0.5)
    assert similarity == pytest.approx(-1)
    assert torch.allclose(merged, certified / 2)


def test_beta_zero_is_the_certified_branch_bit_for_bit() -> None:
    start, natural, certified = states(0)
    result = merge(start, natural, certified, 0.0)
    assert all(torch.equal(result.state[k], certified[k]) for k in certified)


def test_beta_one_follows_the_natural_branch_as_far_as_the_branches_agree() -> None:
    start, natural, certified = (s["weight"] for s in states(3))
    merged, similarity = merge_tensor(start, natural, certified, 1.0)
    assert torch.allclose(merged, start + max(similarity, 0) * (natural - start), atol=1e-6)


def test_no_certified_progress_means_no_change() -> None:
    start, natural, _ = (s["weight"] for s in states(1))
    merged, similarity = merge_tensor(start, natural, start.clone(), 0.5)
    assert similarity == 0
    assert torch.equal(merged, start)


@given(st.integers(0, 10**6), st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_running_variances_stay_non_negative_and_counters_come_from_the_certified_branch(seed: int, beta: float) -> None:
    start, natural, certified = states(seed)
    result = merge(start, natural, certified, beta)
    assert bool((result.state["running_var"] >= 0).all())
    assert int(result.state["num_batches_tracked"]) == 7
    assert result.state["num_batches_tracked"].dtype == torch.long
    assert result.state["weight"].dtype == torch.float32


def test_the_merge_does_not_depend_on_order_of_keys_or_number_of_threads() -> None:
    start, natural, certified = states(4)
    first = merge(start, natural, certified, 0.5)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        second = merge(dict(reversed(start.items())), natural, certified, 0.5)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(first.state[k], second.state[k]) for k in start)


def test_the_cosine_of_a_zero_update_is_zero() -> None:
    assert cosine(torch.zeros(3, dtype=torch.double), torch.ones(3, dtype=torch.double)) == 0
