"""How a model is quantized."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tpuport.foundation.errors import UsageError

Method = Literal["round", "smooth", "hadamard", "duquant", "gptq", "awq"]
_METHODS = ("round", "smooth", "hadamard", "duquant", "gptq", "awq")
_ACTIVATIONS = ("token", "tensor", "channel")
_ESTIMATORS = ("max", "percentile", "mse")
# The largest number of float8 e4m3.
FLOAT8_LIMIT = 448.0
_NAME = re.compile(r"w([48])a(8|16)")


@dataclass(frozen=True)
class QuantizationScheme:
    """How the weights and inputs of linear layers become integers.

    Attributes:
        weight_bits: 4 or 8.
        activation_bits: 8, or 16 for inputs that stay floats.
        number: "int", or "float8" (e4m3) for weights and rounded inputs of eight bits.
        group: input features that share a weight's scale; None: one scale an output channel.
        symmetric: weights have no zero point.
        method: what is done before rounding: "round" (nothing), "smooth" (SmoothQuant),
            "hadamard" (rotations by blocks), "duquant" (permutation and rotations), "gptq" (columns
            make up for the rounding of those before), or "awq" (weights of large inputs are scaled
            up, by searched factors).
        activations: scales of the inputs: by "token" (found in each call), by "tensor" (one, from
            calibration), or by "channel" (from calibration; the products are then of floats).
        activation_symmetric: inputs by token have no zero point.
        estimator: what calibration makes the scales of inputs from: "max", "percentile", "mse".
        percentile: of the percentile estimator.
        clip: "max", or "mse": the best of five weight scales by their square error.
        weight_clip: factor on the range of the weights.
        activation_clip: factor on the range of inputs by token.
        block: features a rotation mixes.
        basis: rotations of DuQuant: "svd" of the weight's blocks, or "greedy", of its paper.
        rotation_steps: most steps of the greedy search.
        strength: SmoothQuant's exponent, 0 (nothing moves to the weights) to 1.
        rotate_outputs: rotate output channels too ("svd" basis), and back after the product.
        seed: of the random rotations in the greedy search.
    """

    weight_bits: int = 8
    activation_bits: int = 8
    group: int | None = None
    symmetric: bool = True
    method: Method = "round"
    activations: Literal["token", "tensor", "channel"] = "token"
    activation_symmetric: bool = True
    estimator: Literal["max", "percentile", "mse"] = "max"
    percentile: float = 99.9
    clip: Literal["max", "mse"] = "max"
    weight_clip: float = 1.0
    activation_clip: float = 1.0
    block: int = 16
    basis: Literal["svd", "greedy"] = "svd"
    rotation_steps: int = 256
    strength: float = 0.5
    rotate_outputs: bool = False
    seed: int = 0
    number: Literal["int", "float8"] = "int"

    def __post_init__(self) -> None:
        """Refuse what no layer can be."""
        for name, choices in (
            ("weight_bits", (4, 8)),
            ("activation_bits", (8, 16)),
            ("method", _METHODS),
            ("number", ("int", "float8")),
            ("activations", _ACTIVATIONS),
            ("estimator", _ESTIMATORS),
            ("clip", ("max", "mse")),
            ("basis", ("svd", "greedy")),
        ):
            if getattr(self, name) not in choices:
                shown = ", ".join(map(repr, choices))
                raise UsageError(f"{name} is one of {shown}; got {getattr(self, name)!r}")
        for refused, message in self._refusals():
            if refused:
                raise UsageError(message)

    def _refusals(self) -> Iterator[tuple[bool, str]]:
        """Yield what does not go together, and why."""
        zeros = not self.symmetric or not self.activation_symmetric
        of_floats, scaled = self.number == "float8", self.method in ("smooth", "awq")
        yield (
            of_floats and (zeros or self.weight_bits != 8),
            "number='float8' has eight bits and no zero points",
        )
        yield (
            of_floats and "mse" in (self.estimator, self.clip),
            "'mse' is of steps of one size, and those of float8 are not; use 'max'",
        )
        yield (
            of_floats and self.method == "gptq",
            "method='gptq' rounds to integers; with number='float8' use another",
        )
        yield (
            self.group is not None and (self.group < 2 or self.group % 2 == 1),
            f"group is an even number of input features; got {self.group!r}",
        )
        yield (
            self.clip == "mse" and not self.symmetric,
            "clip='mse' searches symmetric scales; with symmetric=False use 'max'",
        )
        by_token = self.activation_bits == 8 and self.activations == "token"
        yield (
            not by_token and (not self.activation_symmetric or self.activation_clip != 1.0),
            "activation_symmetric and activation_clip are of inputs that are rounded by token: use"
            " activation_bits=8 and activations='token', or leave them out",
        )
        yield (
            self.is_static and scaled and self.estimator != "max",
            f"estimator={self.estimator!r} would be of inputs before {self.method} scales them;"
            " use estimator='max' or activations='token'",
        )
        yield (
            self.is_static and self.method == "duquant" and self.basis == "greedy",
            "the greedy rotations are made from calibrated inputs, so what they give has no"
            " calibrated range; use activations='token', as the paper does, or basis='svd'",
        )
        yield (
            self.activations == "channel" and self.estimator == "mse",
            "estimator='mse' is of a tensor; by channel use 'max' or 'percentile'",
        )

    @property
    def is_static(self) -> bool:
        """Return whether scales of the inputs come from calibration."""
        return self.activation_bits == 8 and self.activations != "token"

    @property
    def is_calibrated(self) -> bool:
        """Return whether freezing needs statistics."""
        greedy = self.method == "duquant" and self.basis == "greedy"
        return self.is_static or self.method in ("smooth", "gptq", "awq") or greedy

    @property
    def takes_outputs(self) -> bool:
        """Return whether weights are rounded for the least error of outputs on real inputs."""
        return self.method in ("gptq", "awq")

    @property
    def input_limit(self) -> float:
        """Return the largest code of a rounded input."""
        return FLOAT8_LIMIT if self.number == "float8" else 127

    @property
    def name(self) -> str:
        """Return the short name, such as `w4a8`."""
        if self.number == "float8":
            return "fp8" if self.activation_bits == 8 else "fp8a16"
        return f"w{self.weight_bits}a{self.activation_bits}"


def as_scheme(scheme: QuantizationScheme | str) -> QuantizationScheme:
    """Return a scheme, given itself or its short name.

    Raises:
        UsageError: There is no such scheme.
    """
    if isinstance(scheme, QuantizationScheme):
        return scheme
    if scheme == "fp8":
        return QuantizationScheme(8, 8, number="float8")
    found = _NAME.fullmatch(scheme)
    if found is None:
        raise UsageError(
            "scheme is 'w8a8', 'w4a8', 'w4a16', 'w8a16', 'fp8' or a QuantizationScheme; got"
            f" {scheme!r}"
        )
    return QuantizationScheme(int(found[1]), int(found[2]))
