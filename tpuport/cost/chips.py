"""Facts about TPU chips, and how much of one a matrix product can fill.

Sources: peaks, memory and MXU sizes from `jax._src.pallas.mosaic.tpu_info` of jax 0.10.2 (values of
the whole chip) and cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, "System architecture". ICI: "How to
Scale Your Model" (jax-ml.github.io/scaling-book/tpus), table "TPU networking", one direction of one
link. FLOP a cycle: measured in libtpu's schedules of large products (524,288 a bundle on v6e; see
`schedule`), for v4 and v5 also 2 * 4 units * 128 * 128. The clock follows from that and the peak.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tpuport.cost.records import Dot
from tpuport.foundation.errors import UsageError

_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """One chip of a TPU.

    Args:
        name: short name, as in the names of slices.
        device_kind: name of the device in `jax.Device.device_kind`.
        bf16_flops: peak FLOP a second with bf16 operands.
        int8_ops: peak operations a second with int8 operands; 0 if they are no faster than bf16.
        hbm_bytes: size of the HBM.
        hbm_bandwidth: bytes a second from and to HBM.
        ici_link_bandwidth: bytes a second of one link in one direction.
        ici_dims: dims of the mesh or torus of chips.
        cores: number of TensorCores, which together are one device.
        flops_per_cycle: FLOP that the matrix units of one core do in a cycle with bf16 operands.
        mxu_width: rows and columns of a matrix unit.
        vmem_bytes: on-chip memory of a core.
    """

    name: str
    device_kind: str
    bf16_flops: float
    int8_ops: float
    hbm_bytes: int
    hbm_bandwidth: float
    ici_link_bandwidth: float
    ici_dims: int
    cores: int
    flops_per_cycle: int
    mxu_width: int
    vmem_bytes: int

    @property
    def clock_hz(self) -> float:
        """Return the cycles a second."""
        return self.bf16_flops / (self.cores * self.flops_per_cycle)

    def peak(self, lhs_dtype: str, rhs_dtype: str) -> float:
        """Return the peak FLOP a second of products with these dtypes.

        The MXU multiplies bf16. By default XLA rounds fp32 operands to it, so they run at its
        speed; with precision "highest" a product is six of bf16 and takes six times as long.
        """
        both = {lhs_dtype, rhs_dtype}
        if self.int8_ops and both <= {"int8", "uint8"}:
            return self.int8_ops
        return self.bf16_flops

    def mean_peak(self, dots: Iterable[Dot]) -> float:
        """Return the peak FLOP a second of several products, weighted by their FLOPs."""
        flops = seconds = 0.0
        for dot in dots:
            flops += dot.flops
            seconds += dot.flops / self.peak(*dot.dtypes)
        return flops / seconds if seconds else self.bf16_flops

    def fill(self, contraction: int, columns: int) -> float:
        """Return the share of the peak that a product can reach, from 0 to 1.

        Weights are held in the MXU, `mxu_width` of both dims at a time: a contraction or an output
        of 128 fills half of a unit 256 wide, and one of 300 fills 300 of 512. Of the two dims of
        the result either may be the one that is held, so give the smaller one.
        """
        return _share(contraction, self.mxu_width) * _share(columns, self.mxu_width)

    def attention_fill(self, head_dim: int, value_dim: int | None = None) -> float:
        """Return the share of the peak that splash attention can reach.

        Half of its work is q.k, half p.v. Splash holds values in the MXU. A kernel that holds the
        weights themselves, as `kernels.attention.dense` does, fills it in p.v whatever the size of
        values.

        Args:
            head_dim: size of the contraction of q.k.
            value_dim: columns of p.v; None for `head_dim`.
        """
        value_dim = head_dim if value_dim is None else value_dim
        time = head_dim / self.fill(head_dim, self.mxu_width)
        time += value_dim / self.fill(self.mxu_width, value_dim)
        return (head_dim + value_dim) / time


def _share(size: int, width: int) -> float:
    return size / (-(-size // width) * width)


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v4", "TPU v4", 275e12, 0, 32 * _GIB, 1.228e12, 4.5e10, 3, 2, 131072, 128, 16 * _MIB),
        Chip(
            "v5e",
            "TPU v5 lite",
            197e12,
            394e12,
            16 * _GIB,
            8.19e11,
            4.5e10,
            2,
            1,
            131072,
            128,
            128 * _MIB,
        ),
        Chip(
            "v5p", "TPU v5", 459e12, 918e12, 95 * _GIB, 2.765e12, 9e10, 3, 2, 131072, 128, 64 * _MIB
        ),
        Chip(
            "v6e",
            "TPU v6 lite",
            918e12,
            1836e12,
            32 * _GIB,
            1.638e12,
            9e10,
            2,
            1,
            524288,
            256,
            128 * _MIB,
        ),
    )
}


def chip_of(name: str) -> Chip:
    """Look up a chip by `v6e`, a slice (`v6e-8`, `v6e:2x4`, `v5litepod-4`) or a device kind.

    Raises:
        UsageError: the chip is unknown.
    """
    wanted = name.strip().lower()
    for chip in CHIPS.values():
        if wanted == chip.device_kind.lower():
            return chip
    aliases = {"v5litepod": "v5e", "v6litepod": "v6e", "trillium": "v6e", "tpu v5p": "v5p"}
    family = wanted.partition("-")[0].partition(":")[0]
    found = CHIPS.get(aliases.get(family, family))
    if found is None:
        raise UsageError(
            f"Nothing is known about the TPU chip {name!r}. What to do: name one of"
            f" {', '.join(CHIPS)}, or a slice of it such as v6e-8"
        )
    return found
