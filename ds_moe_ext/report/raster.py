# SPDX-License-Identifier: Apache-2.0
"""Indexed images, and text beside them. Shape letters: Y and X pixels, P colours."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np


def data_uri(pixels_YX: np.ndarray, palette_P3: np.ndarray) -> str:
    """An image for ``src``: uint8 indices into RGB colours; index 0 is transparent."""
    return "data:image/png;base64," + base64.b64encode(_png(pixels_YX, palette_P3)).decode("ascii")


def blend(knots: tuple[tuple[int, int, int], ...], at: np.ndarray) -> np.ndarray:
    """Colours between knots that lie evenly from 0 to 1, float ``[P, 3]``."""
    places = np.linspace(0, 1, len(knots))
    return np.stack([np.interp(at, places, channel) for channel in zip(*knots)], axis=1)


def _png(pixels_YX: np.ndarray, palette_P3: np.ndarray) -> bytes:
    """Rows equal to the row above cost nothing."""
    height, width = pixels_YX.shape
    same_Y = np.zeros(height, dtype=bool)
    same_Y[1:] = (pixels_YX[1:] == pixels_YX[:-1]).all(axis=1)
    # A filter byte leads each row: 0 stores it as it is, 2 its difference from the row above.
    filter_Y1 = np.where(same_Y, 2, 0).astype(np.uint8)[:, None]
    rows = np.concatenate([filter_Y1, np.where(same_Y[:, None], 0, pixels_YX)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (
            _chunk(b"IHDR", header),
            _chunk(b"PLTE", palette_P3.tobytes()),
            _chunk(b"tRNS", b"\0"),
            _chunk(b"IDAT", zlib.compress(rows.astype(np.uint8).tobytes(), 6)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
