"""CURE in one file: a network on scikit-learn's handwritten digits, trained to be provably robust in l_inf and l_2 at once.

    python examples/nano_cure.py              # about a minute on one CPU core; needs torch and scikit-learn only

What it does, in the paper's words: per batch, attack every image in both norms and put a small box around each end point
(propagation regions); push the boxes through the network (IBP); train on the worse of the two losses (CURE-Max); pull the two
boxes' outputs together where l_inf is already certified (bound alignment); and after the radii have grown to their targets, merge
every certified epoch with a natural one, tensor by tensor, as far as the two agree (gradient projection). At the end it proves
robustness on the test set by IBP. The real thing, with tight certificates, all norms and resume, is `cure-ray`.
"""

import copy
import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
EPS = {"linf": 0.05, "l2": 0.15}  # radii in pixels, images in [0, 1]
RATIO = {"linf": 0.6, "l2": 1e-5}  # size of the small box relative to the full one (lambda)
EPOCHS, RAMP, BATCH, LR, ETA, BETA = 40, 15, 64, 3e-3, 0.5, 0.5

digits = load_digits()
x_all, y_all = torch.tensor(digits.images / 16.0).float()[:, None], torch.tensor(digits.target)
test = torch.arange(len(y_all)) % 5 == 0
x_train, y_train, x_test, y_test = x_all[~test], y_all[~test], x_all[test], y_all[test]

net = nn.Sequential(
    nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
    nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip
for layer in list(net)[:-1]:
    if isinstance(layer, nn.Conv2d | nn.Linear):  # small weights, so that boxes neither explode nor vanish
        nn.init.normal_(layer.weight, 0, math.sqrt(2 * math.pi) / layer.weight[0].numel())


def affine(layer, x, weight, bias):
    return F.conv2d(x, weight, bias, layer.stride, layer.padding) if isinstance(layer, nn.Conv2d) else F.linear(x, weight, bias)


def margins(net, c, r, y, first_radius=None):
    """Upper bounds u_i on f_i - f_y over the box of centre c and radius r; 0 at i = y. All must be < 0 for a proof."""
    for layer in list(net)[:-1]:
        if isinstance(layer, nn.ReLU):  # [l, u] -> [max(l,0), max(u,0)], written so that tiny radii stay exact
            half = (c + r).clamp(min=0) / 2
            c, r = torch.maximum(c, half), torch.minimum(r, half)
        elif isinstance(layer, nn.Flatten):
            c, r = c.flatten(1), r.flatten(1)
        else:
            c = affine(layer, c, layer.weight, layer.bias)
            r = affine(layer, r, layer.weight.abs(), None) if first_radius is None else first_radius(layer).expand_as(c)
            first_radius = None
    last = net[-1]
    logits = last(c)
    spread = ((last.weight - last.weight[y][:, None]).abs() * r[:, None]).sum(2)  # the last layer is merged with the margin
    return logits - logits.gather(1, y[:, None]) + spread


def region(net, x, y, norm, eps):
    """Eight attack steps, then a box of `RATIO` times the full size around where they ended."""
    low, high = (x - eps).clamp(min=0), (x + eps).clamp(max=1)
    z = low + (high - low) * torch.rand_like(x)
    for size in [0.5] * 4 + [0.05] * 3 + [0.005]:
        z.requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(net(z), y), z)
        if norm == "linf":
            z = z.detach() + size * eps * g.sign()
        else:
            d = z.detach() + size * eps * g / (g.flatten(1).norm(dim=1).view(-1, 1, 1, 1) + 1e-10) - x
            z = x + d * eps / d.flatten(1).norm(dim=1).view(-1, 1, 1, 1).clamp(min=1e-10)
        z = torch.minimum(torch.maximum(z, low), high)
    tau = RATIO[norm] * (high - low) / 2
    return torch.minimum(torch.maximum(z, low + tau), high - tau).detach(), tau


def epoch(net, optimizer, rho):
    """One epoch: natural if rho is None, else certified at rho times the full radii."""
    for index in torch.randperm(len(x_train)).split(BATCH)[:-1]:
        x, y = x_train[index], y_train[index]
        if rho is None or rho == 0:
            loss = F.cross_entropy(net(x), y)
        else:
            u = {norm: margins(net, *region(net, x, y, norm, rho * EPS[norm]), y) for norm in EPS}
            worst = torch.maximum(u["linf"].logsumexp(1), u["l2"].logsumexp(1)).mean()
            gamma = (u["linf"].detach() <= 0).all(1).float()  # samples whose l_inf box is certified
            p, q = u["linf"].log_softmax(1), u["l2"].log_softmax(1)
            loss = worst + ETA * (gamma * (p.exp() * (p - q)).sum(1)).sum() / gamma.sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@torch.no_grad()
def project(net, start, natural):
    """Gradient projection: move with the natural epoch only as far as it agrees with the certified one."""
    for p, s, n in zip(net.parameters(), start.parameters(), natural.parameters(), strict=True):
        g_n, g_c = n - s, p - s
        k = max(F.cosine_similarity(g_n.flatten(), g_c.flatten(), dim=0).item(), 0.0)
        p.copy_(s + BETA * k * g_n + (1 - BETA) * g_c)


@torch.no_grad()
def report(net):
    """Clean accuracy, and the share of test images proven robust: per norm, and in both norms at once (the union)."""
    low, high = (x_test - EPS["linf"]).clamp(min=0), (x_test + EPS["linf"]).clamp(max=1)
    u_inf = margins(net, (low + high) / 2, (high - low) / 2, y_test)
    # An l_2 ball moves neuron j of the first layer by at most eps * ||w_j||_2; boxes from there on.
    u_2 = margins(net, x_test, x_test, y_test, lambda layer: EPS["l2"] * layer.weight.flatten(1).norm(dim=1).view(1, -1, 1, 1))
    mine = F.one_hot(y_test, 10).bool()
    proven = [(u.masked_fill(mine, -1) < 0).all(1) for u in (u_inf, u_2)]
    shares = (net(x_test).argmax(1) == y_test, *proven, proven[0] & proven[1])
    return "  ".join(f"{name} {100 * s.float().mean():.1f} %" for name, s in zip(("clean", "l_inf", "l_2", "union"), shares, strict=True))


optimizer, natural_state = torch.optim.Adam(net.parameters(), LR), None
for e in range(1, EPOCHS + 1):
    rho = min(max(e - 2, 0) / RAMP, 1.0)
    for group in optimizer.param_groups:
        group["lr"] = LR * (0.2 if e > 0.8 * EPOCHS else 1.0)
    start, natural = copy.deepcopy(net), copy.deepcopy(net)
    if rho == 1:  # the natural branch has an Adam of its own, kept over the epochs
        twin = torch.optim.Adam(natural.parameters(), LR)
        if natural_state is not None:
            twin.load_state_dict(natural_state)
        epoch(natural, twin, None)
        natural_state = twin.state_dict()
    loss = epoch(net, optimizer, rho)
    if rho == 1:
        project(net, start, natural)
    if e % 5 == 0:
        print(f"epoch {e}/{EPOCHS}  radius {100 * rho:.0f} %  loss {loss:.3f}  on {len(y_test)} test images: {report(net)}", flush=True)
