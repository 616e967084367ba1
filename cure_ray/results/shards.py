"""The bytes of a shard: verdicts as Parquet with page checksums and the job they belong to, and how far such bytes can be trusted."""

import io
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cure_ray.certification.job import Job, hash_key
from cure_ray.errors import UserError
from cure_ray.results.schema import SCHEMA, check_schema

_Doubles = np.ndarray[Any, np.dtype[np.float64]]
_JOB = b"cure_ray_job"  # file metadata: the job as JSON, so that every shard explains itself
_REPLACES = b"cure_ray_replaces"  # file metadata: the shards a compacted file was made of
_THIN = b"cure_ray_thin"  # file metadata: no statistics, and columns that do not say what they mean: half of a small file
_PLAIN = pa.schema([pa.field(f.name, f.type, f.nullable) for f in SCHEMA])


def serialise(table: pa.Table, job: Job, replaces: Sequence[str]) -> bytes:
    """The same bytes for the same rows, whoever writes them."""
    return _bytes(table, {**SCHEMA.metadata, _JOB: json.dumps(job.key()).encode(), _REPLACES: json.dumps(list(replaces)).encode()})


def _bytes(table: pa.Table, metadata: dict[bytes, bytes]) -> bytes:
    buffer, thin = io.BytesIO(), _THIN in metadata
    plain = table.cast(
        _PLAIN.with_metadata(None) if thin else SCHEMA.with_metadata(metadata)
    )  # a table that was read names the entries of lists differently
    options = {"compression": "zstd", "write_page_checksum": True, "store_schema": not thin, "write_statistics": not thin}
    with pq.ParquetWriter(buffer, plain.schema, **options) as writer:
        writer.write_table(plain)
        if thin:
            writer.add_key_value_metadata(metadata)
    return buffer.getvalue()


def thinned(data: bytes, where: str) -> bytes:
    """The same rows in half the bytes: bounds rounded down to 8 significant bits and attacked margins up, which is what they still are."""
    table = check(data, where)
    rounded = {
        "margin_lb": _rounded(table.column("margin_lb").combine_chunks(), np.floor),
        "margins": _each(table.column("margins").combine_chunks()),
        "attack_margin": _rounded(table.column("attack_margin").combine_chunks(), np.ceil),
    }
    for name, column in rounded.items():
        table = table.set_column(table.schema.get_field_index(name), SCHEMA.field(name), column)
    return _bytes(table, {**pq.read_schema(pa.BufferReader(data)).metadata, _THIN: b"1"})


def _each(column: pa.ListArray) -> pa.ListArray:
    return pa.ListArray.from_arrays(column.offsets, _rounded(column.values, np.floor))


def _rounded(column: pa.Array, way: Callable[[_Doubles], _Doubles]) -> pa.Array:
    """To 8 significant bits. Nulls stay, and so do the infinite and what is no number; nothing comes to lie on the other side of 0."""
    mantissa, exponent = np.frexp(column.to_numpy(zero_copy_only=False))
    return pc.if_else(column.is_valid(), pa.array(np.ldexp(way(mantissa * 256), exponent - 8)), pa.scalar(None, pa.float64()))


_WRITER = pq.ParquetFile(pa.BufferReader(_bytes(SCHEMA.empty_table(), {}))).metadata.created_by


def parse(data: bytes, where: str, columns: list[str] | None = None) -> pa.Table:
    """The rows, every page's checksum verified. UserError naming the file if it is damaged or of another schema."""
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        check_schema(file.schema_arrow, where)
        return file.read(columns=columns or SCHEMA.names)
    except UserError:
        raise
    except Exception as error:  # a flipped bit may raise anything, UnicodeDecodeError and MemoryError among them
        raise damaged(where, str(error).split("\n")[0] or type(error).__name__) from error


def check(data: bytes, where: str) -> pa.Table:
    """The rows of a file that is, to the last byte, what they would be written as: page checksums do not cover headers and the
    footer, whose statistics other readers filter by. A file written by another release of Arrow is trusted that far."""
    table = parse(data, where)
    file = pq.ParquetFile(pa.BufferReader(data))
    metadata = file.schema_arrow.metadata
    try:
        writer = str(file.metadata.created_by)
    except UnicodeDecodeError:
        writer = ""
    if not re.fullmatch(r"parquet-cpp-arrow version [\d.]+(\S*)", writer) or (writer == _WRITER and _bytes(table, metadata) != data):
        raise damaged(where, "its rows can be read, but the file is not what was written")
    if set(table.column("run_id").to_pylist()) != {hash_key(_json(metadata, _JOB, where))}:
        raise damaged(where, "its rows belong to another run than it says")
    return table


def replaces(data: bytes, where: str) -> list[str]:
    """The shards that a compacted file stands for."""
    try:
        metadata = pq.read_metadata(pa.BufferReader(data)).metadata or {}
    except Exception as error:
        raise damaged(where, str(error).split("\n")[0]) from error
    return [str(name) for name in _json(metadata, _REPLACES, where)]


def _json(metadata: dict[bytes, bytes], key: bytes, where: str) -> Any:
    try:
        return json.loads(metadata[key])
    except (KeyError, ValueError) as error:
        raise damaged(where, f"its metadata lack {key.decode()}") from error


def damaged(where: str, why: str) -> UserError:
    return UserError(f"{where} is damaged ({why}); delete it and run the same command again")
