"""Packs the arrays of a report into one HTML file: maps as bytes, selections as gaps and 16-bit scores, compressed."""

import base64
import zlib

import numpy as np

from tamis.arithmetic import ceil_div
from tamis.lab.inspection.notes import LayerNotes


def pack_layer(notes: LayerNotes, source: LayerNotes) -> tuple[dict[str, int | float], str]:
    """A description of a layer's arrays, and the arrays as base64 of one zlib stream. Rows of a layer that shares the
    selection of its `source` are left out.

    The stream holds, one after another and little-endian: the map of selected shares and the map of highest scores
    (uint8 [grid, columns] each, see `_maps`); the highest mass of each row of the map of dense attention's mass
    (float32 [grid], NaN where no query of the row was compared) and that map (uint16 [grid, columns], see `_mass`);
    then for each shown query the number of selected candidates (uint16), the lowest and the highest score (float32
    each, in two arrays); then all candidates as gaps (see `encode_gaps`); then all scores (uint16), 0 to 65535 between
    a query's lowest and highest.
    """
    selected, best, low, high = _maps(notes, source)
    peak, mass = _mass(notes)
    own = notes.extent.shown.numpy() if source is notes else slice(0)
    rows, scores = notes.rows[own], notes.scores[own]
    there = rows >= 0
    counts = there.sum(1)
    floor = np.where(there, scores, np.inf).min(1, initial=np.inf)
    top = np.where(there, scores, -np.inf).max(1, initial=-np.inf)
    floor, top = (np.where(counts > 0, edge, 0).astype("<f4") for edge in (floor, top))
    span = np.where(top > floor, top - floor, 1)[:, None]
    levels = np.rint((scores - floor[:, None]) / span * 65535).clip(0, 65535).astype("<u2")[there]
    gaps = encode_gaps(rows[there], counts)
    parts = (selected, best, peak, mass, counts.astype("<u2"), floor, top, np.frombuffer(gaps, np.uint8), levels)
    stream = zlib.compress(b"".join(np.ascontiguousarray(part).tobytes() for part in parts), 6)
    about = {
        "grid": selected.shape[0],
        "columns": selected.shape[1],
        "candidates": notes.candidates,
        "gapBytes": len(gaps),
        "selectedCount": int(counts.sum()),
        "bestLow": low,
        "bestHigh": high,
    }
    return about, base64.b64encode(stream).decode("ascii")


def _maps(notes: LayerNotes, source: LayerNotes) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Two maps as bytes, and the scores that 1 and 255 mean in the second map.

    The selected share of the pairs in a block is stored as its square root, since most shares are small; 0 means that
    nothing is selected, and any selection gives at least 1.
    """
    share = np.sqrt(notes.counts / np.maximum(_pairs(notes), 1))
    selected = np.where(notes.counts > 0, np.maximum(np.rint(share * 255), 1), 0).clip(0, 255).astype(np.uint8)
    some = np.isfinite(source.best)
    low, high = (float(source.best[some].min()), float(source.best[some].max())) if some.any() else (0.0, 0.0)
    level = (np.where(some, source.best, low) - low) / (high - low if high > low else 1)
    best = np.where(some, 1 + np.rint(level * 254), 0).astype(np.uint8)
    return selected, best, low, high


def _mass(notes: LayerNotes) -> tuple[np.ndarray, np.ndarray]:
    """The highest mass of each row of blocks, and the mass of each block as a square root relative to it.

    A block's mass is dense attention's weight on its candidates, mean over the compared queries of the row. 16 bits, so
    that the page can tell the weight itself and not only a colour.
    """
    mass = notes.mass / np.maximum(notes.mass_rows, 1)[:, None]
    peak = mass.max(1, initial=0)
    level = np.sqrt(mass / np.where(peak > 0, peak, 1)[:, None])
    known = np.where(notes.mass_rows > 0, peak, np.nan)
    return known.astype("<f4"), np.rint(level * 65535).astype("<u2")


def _pairs(notes: LayerNotes) -> np.ndarray:
    """The number of pairs of a query and a visible candidate in each block."""
    grid, columns = notes.counts.shape
    edges = ceil_div(np.arange(columns + 1, dtype=np.int32) * notes.candidates, columns)
    seen = np.minimum(notes.visible[:, None], edges)
    block = np.arange(notes.extent.tokens) * grid // notes.extent.tokens
    pairs = np.zeros((grid, columns), np.int64)
    np.add.at(pairs, block, np.diff(seen, axis=1))
    return pairs


def encode_gaps(candidates: np.ndarray, counts: np.ndarray) -> bytes:
    """The ascending candidates of several queries as variable-length gaps.

    Each candidate is stored as its distance from the one before (the first: from -1) minus one, in groups of seven
    bits, lowest first, with the eighth bit set in all but the last group.
    """
    if not len(candidates):
        return b""
    before = np.concatenate(([-1], candidates[:-1].astype(np.int64)))
    starts = np.cumsum(counts) - counts
    before[starts[counts > 0]] = -1
    gaps = candidates - before - 1
    sizes = 1 + (gaps >= 1 << 7) + (gaps >= 1 << 14) + (gaps >= 1 << 21)
    ends = np.cumsum(sizes)
    out = np.zeros(ends[-1], np.uint8)
    for group in range(4):
        wide = sizes > group
        more = np.where(sizes[wide] > group + 1, 128, 0)
        out[ends[wide] - sizes[wide] + group] = (gaps[wide] >> 7 * group & 127) + more
    return out.tobytes()
