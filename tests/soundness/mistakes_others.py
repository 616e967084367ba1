"""Deliberate mistakes in attacks, keys and cross-checks: what is wrong, file, text (it occurs once), replacement."""

ATTACKS = [
    (
        "the attack after a certificate with one step",
        "attacks/settings.py",
        "AttackSettings(self.steps, max(1,",
        "AttackSettings(1, max(1,",
    ),
    (
        "l2 and l1 attacks start at the image",
        "attacks/search.py",
        "return (start * threat.eps).to(x_BN)",
        "return (start * threat.eps * (threat.norm == 'linf')).to(x_BN)",
    ),
    ("all restarts from one point", "attacks/search.py", "if number == 0:", "if True:"),
    (
        "a candidate is not drawn into the ball",
        "attacks/witness.py",
        "threat.norm, (threat.eps * _INSIDE - rounding)",
        "threat.norm, (2 * threat.eps - rounding)",
    ),
    ("a witness by the margin alone", "attacks/witness.py", "return self.inside & (self.margins <= 0)", "return self.margins <= 0"),
    ("replayed in float32", "attacks/witness.py", ".cpu().double().eval()", ".cpu().float().eval()"),
    ("replayed in training mode", "attacks/witness.py", ".cpu().double().eval()", ".cpu().double().train()"),
]
IDENTITY = [
    (
        "the domain missing from the key",
        "certification/job.py",
        '"attack": attack, "box": str(self.box)}',
        '"attack": attack, "box": "0,1"}',
    ),
    ("the attack missing from the key", "certification/job.py", '"attack": attack, "box"', '"attack": {}, "box"'),
    ("cross-check: the largest margin", "certification/crosscheck.py", "margins.amin(1)", "margins.amax(1)"),
    (
        "cross-check: always the first",
        "certification/crosscheck.py",
        "for i in order[:limit])",
        "for i in range(min(limit, len(certified))))",
    ),
    ("cross-check: another set", "certification/crosscheck.py", "threat, settings.box)", "threat, True)"),
    ("radii of shards rounded", "certification/job.py", "[str(t), t.eps.hex(), t.grid]", "[str(t), round(t.eps, 6), t.grid]"),
    ("grids of shards forgotten", "certification/job.py", "[str(t), t.eps.hex(), t.grid]", "[str(t), t.eps.hex()]"),
    (
        "images known by their shape",
        "data/samples.py",
        "digest.update(tensor.contiguous().numpy().tobytes())",
        "digest.update(str(tensor.shape).encode())",
    ),
]
RESULTS = [
    ("union: any threat", "results/tables.py", "np.asarray(block.all(1))", "np.asarray(block.any(1))"),
    ("unknown counts as certified", "results/evaluations.py", "self.status == CERTIFIED)", "self.status != FALSIFIED)"),
    ("holes of a union filled", "results/evaluations.py", "holes = rows & ~present.all(1)", "holes = rows & ~present.any(1)"),
    ("a witness is not compared with its name", "results/store.py", "if witness_digest(data) != digest:", "if False:"),
    (
        "results on other images continued",
        "results/store.py",
        'for key in ("dataset", "split", "data_digest"):',
        'for key in ("dataset", "split"):',
    ),
    ("results of other settings continued", "results/store.py", "if run_id != job.run_id:", "if False:"),
    ("results of other radii continued", "results/store.py", "if eps != now:", "if False:"),
]
