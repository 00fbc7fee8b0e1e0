"""`python -m tpuport.cost.compile_alone PROGRAM TOPOLOGY`: compile an exported program.

Run by `schedule`, in an environment in which libtpu dumps its schedules.
"""

import pickle
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def main(program: str, topology: str) -> None:
    """Compile the `jax.export.Exported` pickled in a file for one chip of a topology."""
    exported = pickle.loads(Path(program).read_bytes())
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    mesh = Mesh(np.array(described.devices[:1]), ("chip",))
    whole = NamedSharding(mesh, PartitionSpec())
    args = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=whole) for aval in exported.in_avals
    ]
    jax.jit(exported.call).trace(*args).lower(lowering_platforms=("tpu",)).compile()


if __name__ == "__main__":
    main(*sys.argv[1:])
