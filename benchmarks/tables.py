"""600,000 verdicts, from Parquet on disk to every table. Claim: under 10 seconds on one core.

    python benchmarks/tables.py [--rows 600000]

The measured wall and CPU times are in docs/benchmarks.md.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from sections import context, write_section

from cure_ray.results import tables
from cure_ray.results.frames import load
from cure_ray.results.schema import SCHEMA
from cure_ray.results.store import Store
from cure_ray.testing import fabricate

TABLES = (
    tables.accuracy_table,
    tables.stage_table,
    tables.status_table,
    tables.time_table,
    tables.decomposition_table,
    tables.decomposition_summary,
    tables.significance_table,
    tables.seed_table,
    tables.pareto_table,
    tables.compact_table,
)


def write_store(root: Path, rows: int, samples: int = 1000, per_shard: int = 100_000) -> None:
    """A store of `rows` made-up verdicts: rows / 3000 checkpoints with 1000 samples and three norms each."""
    Store.create(root, "digits", "test", "0" * 16, many=True)
    frame = fabricate.verdicts(0, samples, tuple(map(str, range(rows // (3 * samples)))))
    frame["margins"] = [[0.1] * 9] * len(frame)
    (root / "verdicts").mkdir()
    for start in range(0, len(frame), per_shard):
        table = pa.Table.from_pandas(frame.iloc[start : start + per_shard][SCHEMA.names], SCHEMA, preserve_index=False)
        pq.write_table(table.replace_schema_metadata(SCHEMA.metadata), root / "verdicts" / f"part-{start:07d}.parquet")


def measure(rows: int) -> list[str]:
    """Read, then every table, each with wall and CPU seconds; the last line is the sum."""
    lines, total = [], [0.0, 0.0]

    def timed(name: str, work: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        spent = time.perf_counter() - wall, time.process_time() - cpu
        total[0], total[1] = total[0] + spent[0], total[1] + spent[1]
        lines.append(f"| {name} | {spent[0]:.2f} | {spent[1]:.2f} |")
        print(lines[-1], flush=True)
        return result

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "store"
        write_store(root, rows)
        loaded = timed("read, check and join", lambda: load(root))
        for table in TABLES:
            timed(f"`{table.__name__}`", lambda t=table: t(loaded.study))
    size = f"{len(loaded.verdicts):,} verdicts of {len(loaded.study.entries)} checkpoints"
    lines.append(f"| **{size}, all of it** | **{total[0]:.2f}** | **{total[1]:.2f}** |")
    print(lines[-1])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=600_000)
    parser.add_argument("--dry", action="store_true", help="print only, leave docs/benchmarks.md alone")
    options = parser.parse_args()
    lines = measure(options.rows)
    body = [
        context(0, 1),
        "",
        "Made-up verdicts (1,000 images, three norms per checkpoint) as Parquet on disk, to every table of `cure_ray.results.tables`, in "
        "one process. Claim: under 10 seconds.",
        "",
        "| step | wall, s | CPU, s |",
        "|---|---|---|",
        *lines,
    ]
    if not options.dry:
        write_section("Tables", "\n".join(body))


if __name__ == "__main__":
    main()
