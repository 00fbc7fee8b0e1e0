"""Loads a program that `tpuport.export` wrote. It needs jax, and no part of tpuport or torch."""

import json
import struct
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32",
    "U32": "uint32", "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}  # fmt: skip


def load(folder: "str | Path") -> "Program":
    """Return the program in a folder as an object that is called with arrays."""
    return Program(Path(folder))


class Program:
    """A program: its arguments, its state, and the call.

    Attributes:
        arguments: name, dtype and shape of each array that it takes, in order.
        state: parameters and buffers by name; a call replaces those that it changes.
    """

    def __init__(self, folder: Path) -> None:
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        self.arguments: list[dict[str, Any]] = self.manifest["arguments"]
        program = bytearray((folder / "program.stablehlo").read_bytes())
        self.state: dict[str, Any] = read_safetensors(folder / "weights.safetensors")
        for name, (dtype, shape) in self.manifest["state"].items():
            self.state[name] = jnp.asarray(self.state[name], dtype).reshape(shape)
        self._run = jax.jit(jax.export.deserialize(program).call)

    def __call__(self, *arrays: Any, key: Any = None) -> Any:
        """Run the program and return its output; raise what a check of it found.

        Args:
            *arrays: One for each of `arguments`, of that shape.
            key: A key (`jax.random.key(0)`), if the program draws random numbers.
        """
        if len(arrays) != len(self.arguments):
            names = ", ".join(one["name"] for one in self.arguments)
            raise TypeError(f"expected {len(self.arguments)} arrays ({names}), got {len(arrays)}")
        if key is None and self.manifest["random"]:
            raise TypeError("the program draws random numbers: give it a key, jax.random.key(seed)")
        seed = np.zeros(2, np.uint32) if key is None else jax.random.key_data(key)
        given = [self._array(*pair) for pair in zip(arrays, self.arguments, strict=True)]
        leaves, changed, code = self._run(self.state, seed, given)
        if self.manifest["errors"] and int(code):
            raise RuntimeError(self.manifest["errors"][int(code) - 1])
        self.state.update(changed)
        return _built(self.manifest["structure"], leaves)

    def _array(self, array: Any, wanted: dict[str, Any]) -> jax.Array:
        found = jnp.asarray(array)
        if list(found.shape) != wanted["shape"]:
            raise TypeError(
                f"{wanted['name']}: expected {wanted['shape']}, got {list(found.shape)}"
            )
        if found.dtype.kind != jnp.dtype(wanted["dtype"]).kind:
            raise TypeError(f"{wanted['name']}: expected {wanted['dtype']}, got {found.dtype}")
        return found.astype(wanted["dtype"])


def _built(structure: dict[str, Any], leaves: list[Any]) -> Any:
    ((kind, value),) = structure.items()
    if kind == "output":
        return leaves[value]
    if kind == "value":
        return value
    if kind == "dict":
        return {name: _built(part, leaves) for name, part in value.items()}
    parts = [_built(part, leaves) for part in value]
    return parts if kind == "list" else tuple(parts)


def read_safetensors(path: Path) -> dict[str, Any]:
    """Return the arrays of a safetensors file by name."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    found = {}
    for name, one in header.items():
        if name == "__metadata__":
            continue
        first, last = (8 + size + offset for offset in one["data_offsets"])
        dtype = jnp.dtype(_DTYPES[one["dtype"]])
        found[name] = np.frombuffer(data[first:last], dtype).reshape(one["shape"])
    return found
