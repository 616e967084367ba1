"""Patch certification: one square of pixels, anywhere in the image, set to anything in [0, 1]; every position is proven (11).

Positions are tried where the clean gradient is largest first: an image that fails, fails early. float64 decides, see windows.py.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cure_ray import seeding
from cure_ray.attacks import margin, replay_network
from cure_ray.bounds.native.compiled import flatten_images
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.certification.boxes import proven
from cure_ray.certification.bundle import Alarm
from cure_ray.certification.outcome import Outcome, check_clean
from cure_ray.certification.patched import covered, worst_patches
from cure_ray.certification.verdict import Status
from cure_ray.certification.windows import CleanPass, anywhere_margins, clean_pass, patch_margins, positions
from cure_ray.threats.box import UNIT
from cure_ray.threats.patches import Patch, check_size

STAGE = "ibp"
AGAIN = 64  # certified images attacked together


@dataclass(frozen=True)
class PatchSettings:
    """How positions are searched. Only leaving out the attack or the proof changes a verdict, to unknown."""

    attack: bool = True
    prove: bool = True
    precheck: bool = False  # first try one loose bound for all positions together
    candidates: int = 16  # positions attacked per image
    check_every: int = 8  # positions between two looks at who has failed
    batch: int = 100  # images whose clean activations are held at once


def certify_patch(
    engine: NativeEngine,
    network: nn.Sequential,
    x_BCHW: Tensor,
    y_B: Tensor,
    patch: Patch,
    settings: PatchSettings | None = None,
    indices: Sequence[int] | None = None,
    alarm: Alarm | None = None,
) -> list[Outcome]:
    """One outcome per image, in order; `nodes` counts the positions an image was bounded at. Random patches follow the alarm's seed."""
    check_size(patch, (x_BCHW.shape[2], x_BCHW.shape[3]))
    settings = settings or PatchSettings()
    outcomes, indices = list[Outcome](), list(range(len(x_BCHW)) if indices is None else indices)
    for x, y in zip(x_BCHW.split(settings.batch), y_B.split(settings.batch), strict=True):
        outcomes += _certify_batch(engine, network, x.to(engine.device), y.to(engine.device), patch, settings)
    _attack_certified(network, x_BCHW, y_B, patch, outcomes, indices, alarm or Alarm(engine, network))
    return outcomes


def _certify_batch(engine: NativeEngine, network: nn.Module, x: Tensor, y: Tensor, patch: Patch, settings: PatchSettings) -> list[Outcome]:
    outcomes = [Outcome(int(label)) for label in y]
    check_clean(replay_network(network), x, outcomes, UNIT)
    alive = torch.tensor([b for b, o in enumerate(outcomes) if o.open], dtype=torch.long)
    if len(alive):
        started = time.perf_counter()
        salient = _saliency(network, x, y, patch, alive)
        if settings.attack:
            _attack(network, x, y, patch, outcomes, salient, settings.candidates)
        for b in alive.tolist():
            outcomes[b].seconds += (time.perf_counter() - started) / len(alive)
        if settings.prove:
            _prove(engine, x, y, patch, outcomes, salient.positions_BHW, settings)
        for outcome in outcomes:
            if outcome.open:
                outcome.decide(Status.UNKNOWN, "attack")  # the only stage there was
    return outcomes


# ---------------------------------------------------------------- concrete patches


@dataclass(frozen=True)
class _Salient:
    """Where a patch promises most."""

    alive: Tensor  # [A] the images still open
    gradient_ACHW: Tensor  # of their margins
    positions_BHW: Tensor  # [B, H', W'] how much a patch at each position could change the margin; 0 for images that are decided


def _saliency(network: nn.Module, x: Tensor, y: Tensor, patch: Patch, alive: Tensor) -> _Salient:
    where = alive.to(x.device)
    point = x[where].clone().requires_grad_()
    with torch.enable_grad():
        gradient = torch.autograd.grad(margin(network.to(x.device)(point), y[where]).sum(), point)[0]
    room = torch.where(gradient > 0, point.detach(), 1 - point.detach())
    weight = (gradient.abs() * room).sum(1, keepdim=True)
    saliency = torch.zeros(len(x), *(s - k + 1 for s, k in zip(x.shape[2:], (patch.height, patch.width), strict=True)), device=x.device)
    saliency[where] = F.avg_pool2d(weight, (patch.height, patch.width), 1).squeeze(1)
    return _Salient(alive, gradient, saliency)


def _attack(
    network: nn.Module, x: Tensor, y: Tensor, patch: Patch, outcomes: Sequence[Outcome], salient: _Salient, candidates: int
) -> None:
    """Try the corner the gradient points to, black and white at the most salient positions."""
    alive, gradient, saliency = salient.alive, salient.gradient_ACHW, salient.positions_BHW
    where = alive.to(x.device)
    count = min(candidates, saliency[0].numel())
    top_BT = saliency[where].flatten(1).topk(count, dim=1).indices
    best, best_margin = x[where].clone(), torch.full((len(where),), torch.inf, device=x.device)
    corner = (gradient < 0).to(x.dtype)
    for t in range(count):
        top, left = top_BT[:, t] // saliency.shape[2], top_BT[:, t] % saliency.shape[2]
        for fill in (corner, torch.zeros_like(corner), torch.ones_like(corner)):
            candidate = covered(x[where], fill, top, left, patch)
            with torch.no_grad():
                value = margin(network(candidate), y[where])
            better = value < best_margin
            best, best_margin = torch.where(better[:, None, None, None], candidate, best), torch.where(better, value, best_margin)
    replay = replay_network(network)
    with torch.no_grad():
        values = margin(replay(best.cpu().double()), y[where].cpu()).tolist()
    for b, image, value in zip(alive.tolist(), best.cpu().double(), values, strict=True):
        outcomes[b].attack_margin = value
        if value <= 0:
            outcomes[b].witness = image
            outcomes[b].decide(Status.FALSIFIED, "attack", _where(image - x[b].cpu().double()))


def _attack_certified(
    network: nn.Module, x: Tensor, y: Tensor, patch: Patch, outcomes: Sequence[Outcome], indices: Sequence[int], alarm: Alarm
) -> None:
    """Every certified image is attacked once more, by a search that asks no bound, with a fresh seed: the alarm of last resort."""
    where = [b for b, outcome in enumerate(outcomes) if outcome.status == Status.CERTIFIED]
    replay = replay_network(network)
    for some in (where[i : i + AGAIN] for i in range(0, len(where), AGAIN)):
        seeds = [seeding.derive(alarm.seed, "after-certificate", str(patch), indices[b]) for b in some]
        device = next(network.parameters()).device
        found = worst_patches(network, x[some].to(device), y[some].to(device), patch, seeds).cpu().double()
        with torch.no_grad():
            values = margin(replay(found), y[some].cpu()).tolist()
        for b, image, value in zip(some, found, values, strict=True):
            outcome = outcomes[b]
            outcome.attack_margin = value if outcome.attack_margin is None else min(value, outcome.attack_margin)
            if not outcome.attack_margin > 0 or outcome.contradicted_by(outcome.attack_margin):
                what = f"a patched image has margin {outcome.attack_margin:.9g}, below the proven bound"
                alarm.unsound(x[b], outcome, patch, indices[b], what, image if value <= outcome.attack_margin else None)


def _where(change: Tensor) -> str:
    spots = change.abs().sum(0).nonzero()
    row, column = spots.amin(0).tolist()  # a clean image that is right has changed somewhere
    return f"misclassified with pixels changed from row {row}, column {column}"


# ---------------------------------------------------------------- proofs


def _prove(
    engine: NativeEngine, x: Tensor, y: Tensor, patch: Patch, outcomes: Sequence[Outcome], saliency_BHW: Tensor, settings: PatchSettings
) -> None:
    assert engine.decide is not None
    alive = torch.tensor([b for b, o in enumerate(outcomes) if o.open], dtype=torch.long, device=x.device)
    if len(alive) == 0:
        return
    clean = clean_pass(engine.decide, flatten_images(x[alive].double()), y[alive])
    if settings.precheck:
        margins = anywhere_margins(clean, patch.height, patch.width)
        done = proven(margins)
        for i, b in enumerate(alive.tolist()):
            if done[i]:
                outcomes[b].margins = margins[i].cpu()
                outcomes[b].decide(Status.CERTIFIED, STAGE, "proven for all positions together")
        alive, clean = alive[~done], clean.select((~done).nonzero(as_tuple=True)[0])
    # One order for all images, so that they share windows: positions that matter to many of them first.
    places = positions(x.shape[2:], patch.height, patch.width)
    share = saliency_BHW[alive].flatten(1)
    order = (share / share.sum(1, keepdim=True).clamp_min(1e-12)).mean(0).argsort(descending=True).tolist() if len(alive) else []
    _first_positions(clean, alive, patch, outcomes, share, places)
    worst = torch.full((len(alive), clean.rows_BSN.shape[1]), torch.inf, dtype=torch.float64, device=x.device)
    for start in range(0, len(order), settings.check_every):
        keep = torch.tensor([i for i, b in enumerate(alive.tolist()) if outcomes[b].open], dtype=torch.long, device=x.device)
        if len(keep) == 0:
            return
        if len(keep) < len(alive):
            alive, clean, worst = alive[keep], clean.select(keep), worst[keep]
        began = time.perf_counter()
        for place in order[start : start + settings.check_every]:
            # NaN wins in torch.minimum: a bound that failed stays visible.
            worst = torch.minimum(worst, patch_margins(clean, places[place], patch.height, patch.width))
        count = min(settings.check_every, len(order) - start)
        _settle(alive, worst, outcomes, (time.perf_counter() - began) / len(alive), count)
    for i, b in enumerate(alive.tolist()):
        if outcomes[b].open:
            outcomes[b].margins = worst[i].cpu()
            outcomes[b].decide(Status.CERTIFIED, STAGE)


def _first_positions(
    clean: CleanPass, alive: Tensor, patch: Patch, outcomes: Sequence[Outcome], share: Tensor, places: Sequence[tuple[int, int]]
) -> None:
    """Every image at its own most salient position: most failures end here, after one window each."""
    if len(alive) == 0:
        return
    first = share.argmax(1)
    for place in first.unique().tolist():
        index = (first == place).nonzero(as_tuple=True)[0]
        margins = patch_margins(clean.select(index), places[place], patch.height, patch.width)
        _settle(alive[index], margins, outcomes, 0.0, 1)


def _settle(alive: Tensor, worst: Tensor, outcomes: Sequence[Outcome], seconds: float, count: int) -> None:
    """Give up on images with an unproven position."""
    ok = proven(worst).tolist()
    for i, b in enumerate(alive.tolist()):
        outcome = outcomes[b]
        outcome.seconds += seconds
        outcome.nodes += count
        if ok[i] or not outcome.open:
            continue
        outcome.margins = worst[i].cpu()
        if bool(outcome.margins.isnan().any()):
            outcome.decide(Status.ERROR, STAGE, "a bound is NaN (overflow in the weights)")
        else:
            outcome.decide(Status.UNKNOWN, STAGE)
