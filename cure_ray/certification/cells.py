"""How a range of transformation parameters is taken apart: where a search starts, what it halves, and in which order."""

from cure_ray.threats.transformations import Cell, Transformation, root
from cure_ray.threats.warps import effect

Work = list[tuple[Cell, list[int]]]  # cells, each with the images to bound it for


def batches(items: Work, size: int) -> list[Work]:
    """Parts of about this many boxes; a cell's images stay together, so that they share its warp."""
    found, count = list[Work](), size
    for cell, images in items:
        if count + len(images) > size:
            found.append([])
            count = 0
        found[-1].append((cell, images))
        count += len(images)
    return found


def split(transformation: Transformation, cell: Cell, height: int, width: int) -> tuple[Cell, Cell]:
    """Halve the parameter that moves pixels most; the half nearer to the identity first (a stack takes the other one first)."""
    steps, ranges = transformation.steps, cell.ranges(transformation)
    axes = [i for i, (first, last) in enumerate(cell.spans) if last - first > 1]
    axis = max(axes, key=lambda i: effect(steps[i], ranges[i][1] - ranges[i][0], height, width))
    below, above = cell.halves(axis)
    identity = 1.0 if steps[axis].kind in ("Sc", "C") else 0.0
    return (below, above) if sum(ranges[axis]) / 2 >= identity else (above, below)


def partition(transformation: Transformation, height: int, width: int, count: int) -> list[Cell]:
    """The whole range in about `count` parts, whichever are the largest halved again and again; fewer if it has fewer leaves."""
    cells = [root(transformation)]
    while len(cells) < count:
        whole = max(cells, key=lambda cell: cell.leaves)
        if whole.is_leaf:
            break
        cells.remove(whole)
        cells += split(transformation, whole, height, width)
    return cells


def middle(cell: Cell, transformation: Transformation) -> tuple[tuple[float, ...], list[float]]:
    """The centre of a cell, and how far it reaches to either side."""
    ranges = cell.ranges(transformation)
    return tuple((low + high) / 2 for low, high in ranges), [(high - low) / 2 for low, high in ranges]


def starting_cells(transformation: Transformation, height: int, width: int, most: float = 1.0, limit: int = 4096) -> list[Cell]:
    """Boxes coarse enough to be worth a try: no network is proven where pixels move by more than about one place."""
    cells, small = [root(transformation)], list[Cell]()
    while cells and len(cells) + len(small) < limit:
        cell = cells.pop(0)
        ranges = cell.ranges(transformation)
        sizes = [effect(s, high - low, height, width) for s, (low, high) in zip(transformation.steps, ranges, strict=True)]
        divisible = [size for size, (first, last) in zip(sizes, cell.spans, strict=True) if last - first > 1]
        if divisible and max(divisible) > most:
            cells += split(transformation, cell, height, width)
        else:
            small.append(cell)
    centre = [(s.low + s.high) / 2 for s in transformation.steps]

    def distance(cell: Cell) -> float:
        return sum(effect(s, abs((low + high) / 2 - c), height, width)
                   for s, (low, high), c in zip(transformation.steps, cell.ranges(transformation), centre, strict=True))  # fmt: skip

    return sorted(cells + small, key=distance)
