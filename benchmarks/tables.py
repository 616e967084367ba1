"""600,000 verdicts, from Parquet on disk to every table. Claim: under 10 seconds on one core.

    python benchmarks/tables.py [--rows 600000]

Measured: 3.5 to 4.3 s of CPU time on a busy AMD EPYC core; the wall time has not been measured on an idle one.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cure_ray.results import tables
from cure_ray.results.frames import load
from cure_ray.results.schema import SCHEMA
from cure_ray.results.store import Store

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "results"))
import fabricate

TABLES = (
    tables.accuracy_table,
    tables.stage_table,
    tables.status_table,
    tables.time_table,
    tables.decomposition_table,
    tables.significance_table,
    tables.seed_table,
    tables.pareto_table,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=600_000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "store"
        write_store(root, rows)
        began, cpu = time.perf_counter(), time.process_time()
        loaded = load(root)
        read = time.perf_counter() - began
        for table in TABLES:
            table(loaded.study)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    size = f"{len(loaded.verdicts):,} verdicts of {len(loaded.study.entries)} checkpoints"
    print(f"{size}: read {read:.1f} s, read and all tables {wall:.1f} s ({cpu:.1f} s CPU)")


if __name__ == "__main__":
    main()
