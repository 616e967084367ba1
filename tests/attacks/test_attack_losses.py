"""Losses of attacks: their values by hand, and a gradient wherever something can still be gained."""

import math

import pytest
import torch

from cure_ray.attacks.losses import ANY, LOSSES, margin, objective, ranked_classes

LOGITS = torch.tensor([[2.0, 5.0, 1.0, 3.0]], dtype=torch.float64)
Y = torch.tensor([1])


def value(loss: str, target: int) -> float:
    return float(objective(LOGITS, Y, torch.tensor([target]), torch.tensor([LOSSES.index(loss)])))


def test_every_loss_has_its_textbook_value() -> None:
    total = math.log(sum(math.exp(z) for z in LOGITS[0].tolist()))
    assert value("margin", ANY) == 2.0
    assert value("margin", 2) == 4.0
    assert value("cross-entropy", ANY) == pytest.approx(5 - total)  # minus the cross-entropy: lower is worse for the network
    assert value("cross-entropy", 2) == pytest.approx(total - 1)
    assert value("dlr", ANY) == pytest.approx((5 - 3) / (5 - 2))
    assert value("dlr", 0) == pytest.approx((5 - 2) / (5 - (2 + 1) / 2))


@pytest.mark.parametrize("classes", [2, 3, 4, 10])
@pytest.mark.parametrize("loss", range(len(LOSSES)))
def test_descending_any_loss_lowers_the_margin_at_first(classes: int, loss: int) -> None:
    rng = torch.Generator().manual_seed(classes)
    logits = torch.randn(64, classes, generator=rng, dtype=torch.float64)
    y = logits.argmax(1)
    target = ranked_classes(logits, y)[:, 0]
    for aim in (target, torch.full_like(y, ANY)):
        point = logits.clone().requires_grad_()
        slope = torch.autograd.grad(objective(point, y, aim, torch.full_like(y, loss)).sum(), point)[0]
        assert (margin(logits - 1e-4 * slope, y) < margin(logits, y)).all()


def test_other_classes_are_ranked_by_their_logits_and_the_own_one_is_left_out() -> None:
    assert ranked_classes(LOGITS, Y).tolist() == [[3, 0, 2]]
    assert ranked_classes(torch.zeros(1, 4), torch.tensor([2])).tolist() == [[0, 1, 3]]
