"""Images as data URIs, so that the report needs no second file."""

import base64
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG from H x W (grey) or H x W x 3 (colour) bytes."""
    height, width = pixels.shape[:2]
    colour = 2 if pixels.ndim == 3 else 0
    raw = b"".join(b"\0" + row.tobytes() for row in np.ascontiguousarray(pixels))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")


def data_uri(pixels: NDArray[np.uint8]) -> str:
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


def image_uri(image_CHW: Array) -> str:
    """An image of [0, 1] values, one or three channels."""
    levels = np.clip(np.rint(image_CHW * 255), 0, 255).astype(np.uint8)
    return data_uri(levels[0] if len(levels) == 1 else np.moveaxis(levels, 0, -1))


def difference_uri(original_CHW: Array, other_CHW: Array) -> str:
    """Where and in which direction they differ, scaled to the largest change: red brighter, blue darker, white unchanged."""
    change = (other_CHW - original_CHW).mean(0)
    size = float(np.abs(change).max()) or 1.0
    level = change / size
    fade = np.clip(255 * (1 - np.abs(level)), 0, 255)
    red, blue = np.where(level > 0, 255, fade), np.where(level < 0, 255, fade)
    return data_uri(np.stack([red, fade, blue], -1).astype(np.uint8))
