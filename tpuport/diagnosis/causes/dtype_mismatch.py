"""Two operands of one operation have different dtypes."""

import re

from tpuport.diagnosis.causes._cause import Cause, Explanation, Raised, Recorded

_PAIRS = tuple(
    re.compile(pattern)
    for pattern in (
        r"same dtypes?, but got:? (\S+) (?:!=|and) (\S+)",
        r"same dtype, but found (\S+) and (\S+)",
        r"same dtypes?, got (\S+?), (\S+?)[.,]? ",
        r"same dtypes?, got (\S+?), (\S+?)\.?$",
        r"Input type \((\S+)\) and (?:bias|weight) type \((\S+)\)",
        r"dtype to be (.+?),? but got (\S+)",
        r"expected scalar type (\S+) but found (\S+)",
        r"dtypes match, got (\S+) for the destination and (\S+) for the source",
        r"has type (\S+) but the corresponding output .*? has type (\S+?)[,.]",
    )
)
_NAMES = {"c10::Half": "float16", "c10::BFloat16": "bfloat16", "float": "float32"}


class DtypeMismatch(Cause):
    """Two tensors of one operation have different dtypes.

    PyTorch refuses to multiply float32 with bfloat16 unless autocast is on, and jax's `lax`
    functions and the branches of a `cond` or the carry of a `scan` need equal dtypes. Common
    causes: a model in bfloat16 that gets float32 inputs, a buffer or a table left in float32, and
    an autocast for "cuda" that does nothing on the CPU.
    """

    RULES = ("TPU513", "TPU420", "TPU516")
    RECORDED = (
        Recorded(
            "builtins.RuntimeError",
            "mat1 and mat2 must have the same dtype, but got Float and BFloat16",
            "a `torch.nn.Linear` in bfloat16 with a float32 input",
            "the operands have different dtypes, float32 and bfloat16",
        ),
        Recorded(
            "builtins.RuntimeError",
            "expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16",
            "`torch.ones(2, 2) @ torch.ones(2, 2).bfloat16()`",
            "the operands have different dtypes, float32 and bfloat16",
        ),
        Recorded(
            "builtins.RuntimeError",
            "Input type (c10::Half) and bias type (float) should be the same",
            "a float32 convolution with a float16 input",
            "the operands have different dtypes, float16 and float32",
        ),
        Recorded(
            "builtins.TypeError",
            "lax.add requires arguments to have the same dtypes, got float32, int32. (Tip: jnp.add"
            " is a similar function that does automatic type promotion on inputs).",
            "`jax.lax.add(jnp.ones(2), jnp.ones(2, jnp.int32))`",
            "the operands have different dtypes, float32 and int32",
        ),
        Recorded(
            "builtins.TypeError",
            "scan body function carry input and carry output must have equal types, but they"
            " differ:\n\nThe input carry c has type float32[2] but the corresponding output carry"
            " component has type bfloat16[2], so the dtypes do not match.",
            "a `jax.lax.scan` that casts what it carries",
            "the operands have different dtypes, float32[2] and bfloat16[2]",
        ),
    )

    def explain(self, raised: Raised) -> Explanation | None:
        """Explain the error, naming the two dtypes."""
        pair = self._pair(raised.message)
        if pair is None:
            return None
        return Explanation(
            f"the operands have different dtypes, {pair[0]} and {pair[1]}",
            (
                "cast one of them on this line (y.to(x.dtype)), or the model and its inputs"
                " together: model.to(torch.bfloat16) does not cast attributes that are neither"
                " parameters nor buffers",
                "if the code relies on torch.autocast, name the device that it runs on"
                " (device_type=x.device.type): autocast for cuda is off on the CPU",
            ),
        )

    @staticmethod
    def _pair(message: str) -> tuple[str, str] | None:
        for pattern in _PAIRS:
            found = pattern.search(message)
            if found:
                first, second = map(_plain, found.groups())
                # Equal dtypes: the two differ in something else, such as the shape of a carry.
                return None if _dtype(first) == _dtype(second) else (first, second)
        return None


def _plain(name: str) -> str:
    """Return the name of a dtype as Python code has it."""
    name = name.removeprefix("torch.")
    known = _NAMES.get(name)
    if known:
        return known
    words = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"}
    words |= {"Int": "int32", "Long": "int64", "Byte": "uint8", "Bool": "bool", "Char": "int8"}
    return " or ".join(words.get(word, word) for word in name.split(" or "))


def _dtype(name: str) -> str:
    return name.partition("[")[0]
