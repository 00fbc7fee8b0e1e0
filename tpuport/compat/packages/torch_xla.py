"""torch_xla: training code written for it runs, as code written for CUDA does."""

import functools
import os
from typing import Any

from tpuport.compat.imports.optional_imports import copes, importing_frame
from tpuport.compat.packages._package import Package


class TorchXla(Package):
    """`torch_xla`: one process drives all devices of the host, and `"xla"` is the accelerator.

    Code that can do without torch_xla finds none, as a library would otherwise take other paths
    than on CUDA. It is found by everybody once code has imported it that cannot do without, if
    PJRT_DEVICE is set, or with `porting(torch_xla={})`.
    """

    NAME = "torch_xla"
    DISTRIBUTION = "torch_xla"
    VERSION = "2.9.0"
    TARGET = "torch_xla"
    REASON = "its tensors are lazy ones of another runtime, which no program of jax can hold"
    REFERENCE = "torch_xla 2.9.0 with one process; its numbers are those of eager PyTorch"

    def modules(self) -> dict[str, dict[str, Any]]:
        return _modules(self.version())

    def serves(self) -> bool:
        from tpuport.compat.emulated.settings import active
        from tpuport.compat.packages._torch_xla.state import STATE

        settings = active()
        asked = settings is not None and self.NAME in settings.options
        if asked or STATE.is_used or "PJRT_DEVICE" in os.environ:
            return True
        frame, imports = importing_frame()
        if not imports or frame is None:
            return False
        if copes(frame):
            STATE.leave_out(frame)
            return False
        return True

    def explain(self, error: Exception) -> None:
        from tpuport.compat.packages._torch_xla.state import STATE

        if STATE.left_out is not None and not STATE.is_used:
            error.add_note(
                f"tpuport: {STATE.left_out} imports torch_xla where it can do without, and found"
                " none. If the program is to use it, set PJRT_DEVICE=TPU, or CPU, before it starts"
            )
            STATE.left_out = None

    def begin(self) -> None:
        from tpuport.compat.packages._torch_xla import state

        state.begin()

    def end(self) -> None:
        from tpuport.compat.packages._torch_xla import metrics, state

        metrics.end()
        state.end()


@functools.cache
def _modules(version: str) -> dict[str, dict[str, Any]]:
    from tpuport.compat.packages._torch_xla import contents

    return contents.modules(version)
