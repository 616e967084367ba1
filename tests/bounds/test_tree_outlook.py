"""Trees that would not reach 0 within their budget are told from those that would."""

import torch

from cure_ray.bounds.native.outlook import Outlook


def hopeless_after(worst: list[float], budget: int, hope: float = 2.0) -> int | None:
    """The nodes after which a tree is called hopeless; its worst open bound at 1, 2, 4, 8, ... nodes is given."""
    outlook = Outlook(1, torch.zeros(1, 3, dtype=torch.float64))
    for k, bound in enumerate(worst):
        if bool(outlook.hopeless(torch.tensor([2**k]), torch.tensor([bound]), budget, hope)):
            return int(2**k)
    return None


def test_a_tree_that_rises_on_is_followed_to_the_end_of_its_budget() -> None:
    steady = [-1.0, -0.9, -0.8, -0.7, -0.6, -0.5, -0.4, -0.3]
    assert hopeless_after(steady, 2**14) is None
    assert hopeless_after(steady, 2**14, hope=0.9) is None, "two doublings gain a fifth, and ten are enough"
    # 0.1 a doubling: at 4 nodes 0.8 are missing, and twice 0.1 for each of the 3 doublings left is in reach
    assert hopeless_after(steady, 2**5) == 4


def test_a_tree_that_has_stopped_rising_is_given_up_however_far_it_has_come() -> None:
    stuck = [-1.0, -0.8, -0.5, -0.2, -0.2, -0.2]
    assert hopeless_after(stuck, 2**20) == 2**5  # when neither of the last two doublings has gained
    assert hopeless_after([*stuck[:4], -0.2, -0.1, -0.05], 2**20) is None, "a pause of one doubling is no end"


def test_the_first_steps_are_no_measure() -> None:
    assert hopeless_after([-1.0, -1.0], 2**20) is None


def test_samples_are_judged_apart_and_by_nodes_that_jump() -> None:
    outlook = Outlook(3, torch.zeros(3, 1))
    first = outlook.hopeless(torch.tensor([3, 40, 0]), torch.tensor([-1.0, -2.0, -1.0]), 1000, 2.0)
    assert first.tolist() == [False, False, False]
    # 40 to 700 nodes are four doublings, which gained 1.5 or 1.9, and half a doubling is left: at twice that 0.4 or 0.5 are in reach.
    second = outlook.hopeless(torch.tensor([3, 700, 0]), torch.tensor([-1.0, -0.5, -1.0]), 1000, 2.0)
    assert second.tolist() == [False, True, False]
    assert not outlook.hopeless(torch.tensor([3, 700, 0]), torch.tensor([-1.0, -0.1, -1.0]), 1000, 2.0).any()
