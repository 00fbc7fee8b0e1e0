"""openpi's norm_stats.json: moments and quantiles of states and actions."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tpuport.foundation.errors import UsageError
from tpuport.foundation.files import replacing_file

_TINY = 1e-6


@dataclass(frozen=True)
class NormStats:
    """Statistics of vectors: one number by place in the vector each."""

    mean: list[float]
    std: list[float]
    q01: list[float] | None = None
    q99: list[float] | None = None

    @classmethod
    def of(cls, vectors: NDArray[Any]) -> Self:
        """Return the statistics of vectors (..., dim)."""
        flat = vectors.reshape(-1, vectors.shape[-1]).astype(np.float64)
        low, high = np.quantile(flat, (0.01, 0.99), axis=0)
        return cls(*(part.tolist() for part in (flat.mean(0), flat.std(0), low, high)))

    def _limits(self, quantiles: bool) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return what is subtracted, and what is then divided by."""
        if not quantiles:
            return np.array(self.mean), np.array(self.std) + _TINY
        if self.q01 is None or self.q99 is None:
            raise UsageError("the norm stats have no quantiles, and π0.5 needs them")
        low, high = np.array(self.q01), np.array(self.q99)
        half = (high - low + _TINY) / 2
        return low + half, half

    def normalize(self, x: NDArray[Any], *, quantiles: bool) -> NDArray[np.float32]:
        """Return vectors of about unit size, by quantiles within [-1, 1]."""
        middle, size = self._limits(quantiles)
        dim = x.shape[-1]
        return ((x - middle[:dim]) / size[:dim]).astype(np.float32)

    def unnormalize(self, x: NDArray[Any], *, quantiles: bool) -> NDArray[np.float32]:
        """Undo `normalize`; places beyond the statistics are left as they are."""
        middle, size = self._limits(quantiles)
        dim = min(x.shape[-1], len(middle))
        known = x[..., :dim] * size[:dim] + middle[:dim]
        return np.concatenate([known, x[..., dim:]], axis=-1).astype(np.float32)


Stats = Mapping[str, NormStats]  # of "state" and "actions"


def write_stats(folder: Path, stats: Stats) -> None:
    """Write norm_stats.json into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {name: asdict(one) for name, one in stats.items()}
    with replacing_file(folder / "norm_stats.json") as temporary:
        temporary.write_text(json.dumps({"norm_stats": found}, indent=2), encoding="utf-8")


def read_stats(folder: Path) -> Stats:
    """Read norm_stats.json of a folder, or of the only one of its `assets`.

    Raises:
        UsageError: There is none, or it is not of states and actions.
    """
    found = sorted(folder.glob("norm_stats.json")) or sorted(
        folder.glob("assets/**/norm_stats.json")
    )
    if len(found) != 1:
        raise UsageError(
            f"{folder}: {len(found)} norm_stats.json in it or in its assets; expected one. What to"
            " do: give a folder that `finetune` or `make-weights --data` wrote"
        )
    try:
        given = json.loads(found[0].read_text(encoding="utf-8"))["norm_stats"]
        return {name: NormStats(**given[name]) for name in ("state", "actions")}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{found[0]} holds no norm stats of state and actions: {error!r}"
        ) from error
