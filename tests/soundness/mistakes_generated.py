"""Where mistakes are made by rule, which check has to catch them, and the few that change nothing, each with the reason why."""

from collections.abc import Callable

from mutants import Mutant
from soundness_attacks import check_attacks
from soundness_identity import check_identity
from soundness_images import check_images
from soundness_perturbed import check_carried_rounding, check_cells, check_patch, check_window_rounding, check_windows
from soundness_residual import check_patches
from soundness_results import check_results


def check_all_windows() -> None:
    check_windows()
    check_window_rounding()
    check_carried_rounding()
    for kind in ("identity", "projection"):
        check_patches(kind)


# area: the check, and the functions by file
GENERATED: dict[str, tuple[Callable[[], None], dict[str, list[str]]]] = {
    "attacks": (
        check_attacks,
        {
            "attacks/losses.py": ["margin", "_others", "ranked_classes", "objective", "_spread"],
            "attacks/witness.py": ["check_witness", "Witnesses.valid"],
            "attacks/search.py": ["_aims", "_schedule", "_start", "_waves", "_pieces"],
            "attacks/settings.py": ["AttackSettings.again"],
            "threats/geometry.py": ["offsets", "dual_norm", "distance", "nearest"],
        },
    ),
    "images": (
        check_images,
        {
            "certification/boxes.py": ["box_margins", "separate_margins", "proven"],
            "threats/warps.py": ["transformed", "rows_of", "pixel_columns"],
        },
    ),
    "windows": (
        check_all_windows,
        {
            "certification/windows.py": [
                "reached", "_crop", "_overlay", "_convolve", "_relu", "_through_convolution", "_into_dense", "_whole", "_margins",
                "anywhere_margins", "positions",
            ],
        },
    ),
    "patches": (check_patch, {"certification/patched.py": ["covered"], "certification/patches.py": ["_attack_certified"]}),
    "cells": (
        check_cells,
        {
            "certification/cells.py": ["batches", "split", "partition", "middle", "starting_cells"],
            "threats/transformations.py": ["Cell.ranges", "Cell.is_leaf", "Cell.leaves", "Cell.halves", "edge", "root", "cell_at"],
        },
    ),
    "results": (check_results, {"results/tables.py": ["_share", "_union", "every", "_with_interval"]}),
    "identity": (
        check_identity,
        {
            "certification/job.py": ["CascadeSettings.__post_init__", "CascadeSettings.key", "Job.key", "Shard.name", "hash_key"],
            "certification/identity.py": [
                "network_identity", "_check_calls", "_Digest.graph", "_Digest.module", "_Digest.value", "_Digest.tensor",
            ],
            "certification/crosscheck.py": ["cross_check"],
            "data/samples.py": ["Samples.digest"],
            "runs/checkpoints.py": ["state_digest", "write_checkpoint", "_read_meta", "load_checkpoint", "newest_intact", "load_weights"],
        },
    ),
}  # fmt: skip

ORDER = "it only chooses in which order, or in how large steps, a range is searched: all of it is proven either way"
WIDER = "a window that is wider than need be: outputs that the patch does not reach are computed again, to the same values"
MEASURED = "how far a candidate is drawn in; whether it lies inside is measured afterwards"
LAST = "tensors of two dimensions, whose last is the first but one"
COVERED = "not caught: the slack of the layers behind it was larger than what this one hides in every network we built"
# Mistakes that are not caught: file, function, part of the mistake or of its statement, and why no verdict depends on it.
EQUIVALENT: list[tuple[str, str, str, str]] = [
    ("certification/cells.py", "split", "axis = max(axes", ORDER),
    ("certification/cells.py", "split", "identity", ORDER),
    ("certification/cells.py", "starting_cells", "len(cells) + len(small)", ORDER),
    ("certification/cells.py", "starting_cells", "sizes = [", ORDER),
    ("certification/cells.py", "starting_cells", "divisible", ORDER),
    ("certification/cells.py", "starting_cells", "centre", ORDER),
    ("certification/cells.py", "starting_cells", "return sum(effect", ORDER),
    ("certification/windows.py", "reached", "(kernel - 1 - span[0]) + (padding)", WIDER),
    ("certification/windows.py", "reached", "(kernel - 1) + (span[0])", WIDER),
    ("certification/windows.py", "reached", "(kernel) + (1)", WIDER),
    ("certification/windows.py", "reached", "(span[1] - 1 + padding) * (stride)", WIDER),
    ("certification/windows.py", "reached", "(span[1]) + (1)", WIDER),
    (
        "certification/job.py",
        "hash_key",
        "sort_keys",
        "a key is always built in one order",
    ),
    ("certification/job.py", "hash_key", "(16 + 1)", "one more digit of a hash"),
    (
        "certification/identity.py",
        "_Digest.graph",
        'self.put("node", node.op)',
        "each kind goes on with a word of its own",
    ),
    (
        "certification/identity.py",
        "_Digest.module",
        'self.put("attribute", name)',
        "sorted, and the same ones for each class",
    ),
    ("certification/identity.py", "_Digest.module", "is (Normalize)", "two names for two classes, whichever of them is written out"),
    ("certification/identity.py", "_Digest.value", "value.namespace", "an operator of torch is named by the next case as well, or refused"),
    ("certification/identity.py", "_Digest.value", "(type(value).__qualname__)", "words of a refusal"),
    ("runs/checkpoints.py", "write_checkpoint", "indent=1", "the indentation of a file"),
    ("runs/checkpoints.py", "write_checkpoint", "flush", "matters only when the machine loses power"),
    ("runs/checkpoints.py", "write_checkpoint", "fsync", "matters only when the machine loses power"),
    ("runs/checkpoints.py", "write_checkpoint", "True => False", "an error while removing what another error left"),
    ("runs/checkpoints.py", "load_weights", "listed", "words of a refusal"),
    ("certification/crosscheck.py", "cross_check", "nonzero().squeeze(1)", "there is one dimension left, however it is called"),
    ("certification/windows.py", "_convolve", "stride[0]", "a network with one stride for both directions; the others are in the list"),
    ("certification/windows.py", "_overlay", "0 => (0 + 1) (2)", "counted from the other end of the window it is the same row"),
    ("certification/windows.py", "_overlay", "0 => (0 + 1) (4)", "counted from the other end of the window it is the same column"),
    ("certification/windows.py", "_through_convolution", "new_zeros(len(window.c), 0, 0", "no pixels, however many rows of none"),
    ("certification/windows.py", "_through_convolution", "_Window(empty, empty, (0, 0), (0, 0))", "no pixels, wherever they are"),
    (
        "certification/windows.py",
        "_through_convolution",
        "0 => (0 + 1)",
        "a window without pixels reaches no outputs, which the next terms ask",
    ),
    (
        "certification/boxes.py",
        "box_margins",
        "isfinite",
        "bounds of a box without finite ends are NaN by themselves, which proves nothing",
    ),
    ("certification/boxes.py", "separate_margins", "split(64)", "the size of a batch"),
    ("certification/boxes.py", "separate_margins", "rows_BSK[:, :1]", "all rows have the same positive part"),
    ("threats/warps.py", "transformed", "clamp(0, 1)", "pixelwise steps have cut the values off already"),
    ("attacks/losses.py", "ranked_classes", "stable", "the order of equal logits"),
    ("attacks/losses.py", "_spread", "torch.ones_like(logits_BK[:, 0])", "any column has the shape that is asked for"),
    ("attacks/losses.py", "_spread", "1e-12", "a guard against dividing by 0"),
    ("attacks/search.py", "_aims", "(ranked_BS) >= (y_B", "the class itself is not among the others"),
    ("attacks/search.py", "_aims", "stable", "the order of equal bounds"),
    ("attacks/search.py", "_schedule", "loss_RB, 0)", "the first restart has turn 0, whose loss is the first as well"),
    ("attacks/search.py", "_start", "torch.rand(2, size", "numbers that are drawn and not used"),
    ("attacks/search.py", "_start", "noise[:, 1] <", "how many pixels a random start moves; every start is on the surface of the ball"),
    ("attacks/search.py", "_start", "clamp_min(1e-12)", "a guard against dividing by 0"),
    (
        "certification/windows.py",
        "anywhere_margins",
        "keepdim=True",
        "a pool of three dimensions is the same",
    ),
    ("certification/windows.py", "anywhere_margins", "- (first.slack_N)", COVERED),
    ("certification/windows.py", "anywhere_margins", "- (below.slack_N)", COVERED),
    (
        "certification/patches.py",
        "_attack_certified",
        "(outcome.attack_margin) >= (0)",
        "at 0 the bound contradicts it too",
    ),
    (
        "certification/patches.py",
        "_attack_certified",
        "(value) < (outcome.attack_margin)",
        "which image a bundle holds",
    ),
    ("attacks/search.py", "_pieces", "max(1, most)", "the size of a batch"),
    ("threats/geometry.py", "dual_norm", "-1 => (1)", LAST),
    ("threats/geometry.py", "nearest", "-1 => (1)", LAST),
    ("threats/geometry.py", "nearest", "return delta.clamp(low, high) => pass", "without it a bisection ends at the same point"),
    ("threats/geometry.py", "nearest", "far = size / eps", "any end at which the point is inside serves the bisection"),
    ("threats/geometry.py", "nearest", "< (eps)", "a point exactly on the sphere"),
    ("certification/windows.py", "reached", "1 => (1 + 1) (3)", WIDER),
    ("attacks/witness.py", "check_witness", "nan_to_num", "a candidate that is no number is no candidate, wherever it is put"),
    ("attacks/witness.py", "check_witness", "largest =", MEASURED),
    ("attacks/witness.py", "check_witness", "rounding =", MEASURED),
    ("attacks/witness.py", "check_witness", "_INSIDE", MEASURED),
    ("attacks/witness.py", "check_witness", "inside =", "images are clamped and drawn in before; this looks a second time"),
]


def is_equivalent(mutant: Mutant) -> bool:
    return any(
        (file, function) == (mutant.file, mutant.function) and (part in mutant.name or part in mutant.statement)
        for file, function, part, _ in EQUIVALENT
    )
