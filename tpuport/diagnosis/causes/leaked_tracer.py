"""A value of one trace is used after it."""

import re

from tpuport.diagnosis.causes._cause import Cause, Explanation, Raised, Recorded
from tpuport.diagnosis.causes._reading import array_type
from tpuport.foundation.user_frames import is_inside

_TRACED = re.compile(r"when the value leaked was (.+?) at (\S+?):(\d+) traced for (\w+)")
_STACK = re.compile(r"^(?:The leaked .* created on line )?(\S+?):(\d+):\d+ \((.+?)\)", re.MULTILINE)


class LeakedTracer(Cause):
    """A tensor of one trace is used in another, or after it.

    The code keeps a tensor in a place that outlives the program: an attribute, a global, a list, a
    cache, or the state of a random generator. At the next call it is a value of a program that is
    gone. One that was made in `get_and_rotate_prng_key` is the state of torchax's own generator,
    which advances inside the user's `jax.jit`.
    """

    RULES = ("TPU414", "TPU413", "TPU412", "TPU415")
    RECORDED = (
        Recorded(
            "jax.errors.UnexpectedTracerError",
            "Encountered an unexpected tracer. A function transformed by JAX had a side effect,"
            " allowing for a reference to an intermediate value with type float32[4,3] wrapped in a"
            " DynamicJaxprTracer to escape the scope of the transformation.\nJAX transformations"
            " require that functions explicitly return their outputs, and disallow saving"
            " intermediate values to global state.\nThe function being traced when the value leaked"
            " was pure at plain.py:62 traced for jit.\n------------------------------\nThe leaked"
            " intermediate value was created on line /src/model.py:31:8 (Block.forward). \n",
            "`cache.append(x * 2)` in one call, `torch.sin(cache[0])` in the next",
            "a value of an earlier trace is used here: it was kept where it outlives its program",
        ),
        Recorded(
            "jax.errors.UnexpectedTracerError",
            "Encountered an unexpected tracer. A function transformed by JAX had a side effect,"
            " allowing for a reference to an intermediate value with type key<fry>[] wrapped in a"
            " DynamicJaxprTracer to escape the scope of the transformation.\n",
            "`torch.dropout` in two calls of a `jax.jit` of one's own",
            "the key of torchax's random generator was left inside an earlier trace",
        ),
    )

    def explain(self, raised: Raised) -> Explanation | None:
        """Explain the error, naming the value that leaked, and the line that made it."""
        if not raised.is_a("jax.UnexpectedTracerError"):
            return None
        value = array_type(raised.message)
        if (value or "").startswith("key<") or raised.says("get_and_rotate_prng_key"):
            return Explanation(
                "the key of torchax's random generator was left inside an earlier trace",
                (
                    "port the model with tpuport.convert(model), which draws fresh numbers in each"
                    " call from a key that is an argument of the program",
                    "or set the key yourself around each call: torchax.default_env().manual_seed(0)"
                    " before, and the key as an argument of the jitted function",
                ),
                value,
                self._made(raised.message),
            )
        return Explanation(
            "a value of an earlier trace is used here: it was kept where it outlives its program",
            (
                "return the value from the function in place of keeping it, or keep it in a buffer"
                " (register_buffer), whose new value tpuport.convert hands back after each call",
                "to stop where it leaks, run with JAX_CHECK_TRACER_LEAKS=1",
            ),
            value,
            self._made(raised.message),
        )

    @staticmethod
    def _made(message: str) -> tuple[str, ...]:
        lines = []
        # The stack goes from the outermost to the innermost, after the line of the value itself.
        places = [p for p in _STACK.findall(message) if not is_inside(p[0])]
        if places:
            file, line, function = places[-1]
            lines.append(f"made at {file}:{line} in {function}")
        traced = _TRACED.search(message)
        if traced:
            name, file, line, transformation = traced.groups()
            lines.append(f"while {name} ({file}:{line}) was traced for {transformation}")
        return tuple(lines)
