"""jax cannot have the TPU."""

import re

from tpuport.diagnosis.causes._cause import Cause, Explanation, Raised, Recorded

_PROCESS = re.compile(r"already in use by process with pid (\d+)")
_BACKEND = re.compile(r"Unable to initialize backend '(\w+)'")
_REASON = re.compile(_BACKEND.pattern + r": (?:[A-Z_]+: )?(.*?)(?: \(set JAX_PLATFORMS|$)", re.S)
_HELD = "The TPU is already in use", "libtpu.so already in use", "libtpu_lockfile"
_CHOOSE = "or let jax choose: unset JAX_PLATFORMS"


class TpuUnavailable(Cause):
    """jax cannot have the TPU, or another device that it was told to use.

    One process has a TPU at a time: a second one is refused, or hangs. A notebook that is still
    open, a run that did not end, or a worker process that imported jax, holds it.
    """

    RECORDED = (
        Recorded(
            "builtins.RuntimeError",
            "Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process with"
            " pid 176028. Not attempting to load libtpu.so in this process. (set JAX_PLATFORMS=''"
            " to automatically choose an available backend)",
            "https://github.com/jax-ml/jax/issues/22070",
            "the TPU is held by another process, 176028",
        ),
        Recorded(
            "builtins.RuntimeError",
            "Unable to initialize backend 'tpu': INTERNAL: Failed to open libtpu.so: libtpu.so:"
            " cannot open shared object file: No such file or directory (set JAX_PLATFORMS='' to"
            " automatically choose an available backend)",
            "`JAX_PLATFORMS=tpu` without libtpu",
            "jax was told to use tpu and cannot: libtpu is not installed",
        ),
        Recorded(
            "builtins.RuntimeError",
            "Unable to initialize backend 'tpu': NOT_FOUND: TPU initialization failed: No jellyfish"
            " device found. (set JAX_PLATFORMS='' to automatically choose an available backend)",
            "`JAX_PLATFORMS=tpu` on a machine without a TPU",
            "jax was told to use tpu and cannot: this machine has no TPU, or none that this user"
            " may open",
        ),
        Recorded(
            "builtins.RuntimeError",
            "Unable to initialize backend 'tpu': NOT_FOUND: GetPjrtApi not found in"
            " /usr/lib/libm.so.6 (set JAX_PLATFORMS='' to automatically choose an available"
            " backend)",
            "`TPU_LIBRARY_PATH=/usr/lib/libm.so.6`",
            "jax was told to use tpu and cannot: GetPjrtApi not found in /usr/lib/libm.so.6",
        ),
    )

    def explain(self, raised: Raised) -> Explanation | None:
        """Explain the error, naming the process that holds the TPU, or the missing package."""
        if raised.says(*_HELD):
            found = _PROCESS.search(raised.message)
            holder = f", {found.group(1)}" if found else ""
            show = f"ps -fp {found.group(1)}" if found else "sudo lsof -w /dev/accel* /dev/vfio/*"
            return Explanation(
                f"the TPU is held by another process{holder}",
                (
                    f"see which one it is and end it: {show}",
                    "or run this one on the CPU: JAX_PLATFORMS=cpu",
                    "if none is left, remove the lock: sudo rm /tmp/libtpu_lockfile",
                ),
            )
        backend = _BACKEND.search(raised.message)
        if backend is None:
            return None
        name = backend.group(1)
        if name == "tpu" and raised.says("Failed to open libtpu.so"):
            return Explanation(
                "jax was told to use tpu and cannot: libtpu is not installed",
                ('pip install "tpuport[tpu]"', _CHOOSE),
            )
        if name == "tpu" and raised.says("No jellyfish device found"):
            return Explanation(
                "jax was told to use tpu and cannot: this machine has no TPU, or none that this"
                " user may open",
                ("look for it: ls -l /dev/accel* /dev/vfio/*", _CHOOSE),
            )
        if name == "tpu" and raised.says("GetPjrtApi not found"):
            return Explanation(
                f"jax was told to use tpu and cannot: {_reason(raised)}",
                ("let jax take the libtpu that is installed: unset TPU_LIBRARY_PATH", _CHOOSE),
            )
        return Explanation(
            f"jax was told to use {name} and cannot: {_reason(raised)}",
            ("list the devices with `tpuport doctor`, or let jax choose: unset JAX_PLATFORMS",),
        )


def _reason(raised: Raised) -> str:
    """Return jax's words on why a backend does not start, in one line."""
    found = _REASON.search(raised.message)
    words = " ".join(found.group(2).split()) if found else ""
    return words.rstrip(".") or "no reason is given"
