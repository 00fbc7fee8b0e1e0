"""Rates that were measured on a chip, in place of those that its maker states."""

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpuport.cost.chips import Chip
from tpuport.foundation.errors import UsageError
from tpuport.foundation.reporting.json_codec import decoded

# The key of a calibration in the file that `tpuport doctor --measure` writes.
KEY = "calibration"


@dataclass(frozen=True)
class Calibration:
    """What was measured on one kind of device; None for what was not.

    Args:
        device_kind: name of the device in `jax.Device.device_kind`.
        platform: JAX's name of the platform: only "tpu" says something about TPUs.
        num_devices: number of devices that took part.
        measured_at: day and time, ISO 8601.
        dense_efficiency: share of the chip's bf16 peak that a large product reached.
        int8_ops: operations a second of a large int8 product.
        hbm_bandwidth: bytes a second that were read and written.
        ici_link_bandwidth: bytes a second of one link in one direction, such that the cost model
            gives the times that collectives took.
        kernel_factor: times of kernels over the times by their schedules.
        versions: versions of the packages.
        source: file that it was read from.
    """

    device_kind: str
    platform: str
    num_devices: int
    measured_at: str
    dense_efficiency: float | None = None
    int8_ops: float | None = None
    hbm_bandwidth: float | None = None
    ici_link_bandwidth: float | None = None
    kernel_factor: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    source: str = ""

    def apply(self, chip: Chip) -> Chip:
        """Return the chip with the rates that were measured.

        Raises:
            UsageError: it was measured on another kind of device.
        """
        if self.platform != "tpu" or self.device_kind != chip.device_kind:
            raise UsageError(
                f"The calibration {self.source or 'given'} was measured on"
                f" {self.device_kind!r} ({self.platform}), and the program is for"
                f" {chip.device_kind!r}. What to do: run `tpuport doctor --measure` on a"
                f" {chip.name}, or leave calibration= out"
            )
        rates = {
            "int8_ops": self._int8_peak() if chip.int8_ops else None,
            "hbm_bandwidth": self.hbm_bandwidth,
            "ici_link_bandwidth": self.ici_link_bandwidth,
        }
        return dataclasses.replace(chip, **{k: v for k, v in rates.items() if v is not None})

    def _int8_peak(self) -> float | None:
        """Return the peak of which `dense_efficiency` gives the rate that was measured."""
        return None if self.int8_ops is None else self.int8_ops / (self.dense_efficiency or 1.0)

    def __str__(self) -> str:
        packages = "".join(f", {name} {version}" for name, version in self.versions.items())
        return (
            f"{self.source or 'a calibration'}: {self.num_devices} x {self.device_kind},"
            f" {self.measured_at}{packages}"
        )


def read_calibration(source: "str | os.PathLike[str] | Calibration") -> Calibration:
    """Read the calibration in a file of `tpuport doctor --measure`.

    Raises:
        UsageError: there is no such file, or it has no calibration that makes sense.
    """
    if isinstance(source, Calibration):
        return source
    path = Path(source)
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))[KEY]
        calibration = dataclasses.replace(decoded(Calibration, found), source=str(path))
    except OSError as error:
        raise UsageError(
            f"The calibration {path} cannot be read: {error.strerror}. What to do: give the file"
            " that `tpuport doctor --measure` wrote"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{path} is no file of `tpuport doctor --measure`: {type(error).__name__}: {error}"
        ) from None
    _check(calibration, path)
    return calibration


def _check(calibration: Calibration, path: Path) -> None:
    """Refuse numbers that no device has.

    Raises:
        UsageError: a rate is not above zero, or a share is above one.
    """
    for name in (
        *("dense_efficiency", "int8_ops", "hbm_bandwidth", "ici_link_bandwidth"),
        "kernel_factor",
    ):
        value = getattr(calibration, name)
        most = 1.0 if name == "dense_efficiency" else float("inf")
        if value is not None and not 0 < value <= most:
            raise UsageError(f"{path} has {name} {value!r}, which no device has")
