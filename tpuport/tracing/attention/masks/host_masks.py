"""The structure of masks that are concrete arrays, made on the host by the user's code."""

from dataclasses import dataclass

import numpy as np

from tpuport.tracing.attention.masks.bands import Band
from tpuport.tracing.attention.masks.short_forms import run_ends


@dataclass
class HostMask:
    """The structure of a concrete mask.

    Attributes:
        band: Limits that hold everywhere.
        segments: Ids of queries and of keys, where equal ids see each other, or None.
    """

    band: Band
    segments: tuple[np.ndarray, np.ndarray] | None = None


def host_mask(seen: np.ndarray) -> HostMask | None:
    """Return the structure of a mask [queries, keys] (a band, segments or both), or None."""
    num_q, num_k = seen.shape
    ends = run_ends(seen)
    if ends is None:
        return None
    first, last = ends
    band = Band(_low(first, last), _high(first, last, num_k))
    if _same(band.rows(num_q, num_k), (first, last)):
        return HostMask(band)
    if num_q == num_k and (first <= last).all():
        found = _segments(first, last, band)
        if found is not None:
            return found
    return None


def _low(first: np.ndarray, last: np.ndarray) -> int | None:
    """Return the lower limit shared by rows whose first key is neither 0 nor missing, or None."""
    q = np.arange(len(first))
    limits = np.unique((first - q)[(first > 0) & (last >= first)])
    if len(limits) == 1:
        return int(limits[0])
    return None


def _high(first: np.ndarray, last: np.ndarray, num_k: int) -> int | None:
    q = np.arange(len(last))
    limits = np.unique((last - q)[(last < num_k - 1) & (last >= first)])
    if len(limits) == 1:
        return int(limits[0])
    return None


def _same(rows: tuple[np.ndarray, np.ndarray], given: tuple[np.ndarray, np.ndarray]) -> bool:
    """Return whether each query sees the same keys; limits of queries that see none are ignored."""
    none = [low > high for low, high in (rows, given)]
    equal = (rows[0] == given[0]) & (rows[1] == given[1])
    return bool((equal | (none[0] & none[1])).all())


def _segments(first: np.ndarray, last: np.ndarray, band: Band) -> HostMask | None:
    """Find blocks along the diagonal, complete or cut by a band."""
    size = len(first)
    for ids, kept in ((first, band if band.low is None else Band(high=band.high)), (last, band)):
        if not (np.diff(ids) >= 0).all():
            continue
        starts = np.searchsorted(ids, ids, side="left")
        ends = np.searchsorted(ids, ids, side="right") - 1
        for limits in (Band(), kept):
            low, high = limits.rows(size, size)
            rows = np.maximum(low, starts), np.minimum(high, ends)
            if _same(rows, (first, last)):
                return HostMask(limits, (ids.astype(np.int32), ids.astype(np.int32)))
    return None
