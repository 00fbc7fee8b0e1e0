"""`torch_xla` itself: the device, steps, `compile` and `launch`."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tpuport.compat.emulated import replicas
from tpuport.compat.packages._torch_xla import multiprocessing, runtime
from tpuport.compat.packages._torch_xla.metrics import traces
from tpuport.compat.packages._torch_xla.rng import set_rng_state
from tpuport.compat.packages._torch_xla.state import STATE, mark_step
from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop.device_mark import XLA, is_accelerator

# From here on, each function is named and called as in torch_xla.


def device(index: int | None = None) -> torch.device:
    """Return the device: "xla:0", as one process has one accelerator."""
    if index is not None:
        is_accelerator(torch.device("xla", index))
    return XLA


def devices() -> list[torch.device]:
    """Return the devices that tensors can be on: the one."""
    return [XLA]


def real_devices() -> list[str]:
    """Return the name of the device by its hardware, such as "TPU:0"."""
    return [f"{runtime.device_type()}:0"]


def device_count() -> int:
    """Return the number of devices that tensors can be on, 1."""
    return 1


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    """End a step: run the closures that wait for it. Nothing is lazy, so nothing is launched."""
    del reset_scope
    mark_step()
    if wait:
        runtime.wait_device_ops()


def step() -> Any:
    """Return a context, or decorator, around a step."""
    return compile()


# The number of programs traced inside each function of `compile(max_different_graphs=...)`.
_TRACED: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()


def compile(
    f: Callable[..., Any] | None = None,
    full_graph: bool | None = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
) -> Any:
    """Return a function or context with a step boundary before and after it.

    The calls of modules inside are programs in any case, and what is around them runs in eager
    PyTorch, so `full_graph` has nothing to check.
    """
    del full_graph, name

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        sync()
        before = traces()
        try:
            yield
        finally:
            sync()
        if max_different_graphs is not None and f is not None:
            _TRACED[f] = _TRACED.get(f, 0) + traces() - before
            _check_graphs(f, max_different_graphs)

    if f is None:
        return around()

    @functools.wraps(f)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        with around():
            return f(*args, **kwargs)

    return compiled


def _check_graphs(function: Any, most: int) -> None:
    if _TRACED[function] > most:
        raise UsageError(
            f"torch_xla.compile(max_different_graphs={most}): {_TRACED[function]} programs were"
            f" traced in {getattr(function, '__name__', function)}. What to do: give it arguments"
            " of fewer shapes (the report says what changed), or raise the limit"
        )


def manual_seed(seed: int, device: Any = None) -> None:
    """Restart the random numbers, of the host too: there is one stream."""
    set_rng_state(seed, device)


def launch(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    start_method: str = "spawn",
    debug_single_process: bool = False,
) -> None:
    """Call `fn(ordinal, *args)` in this process: see `xmp.spawn`."""
    if debug_single_process and replicas.size() > 1:
        raise UsageError(
            f"torch_xla.launch(debug_single_process=True) in one of {replicas.size()} replicas."
            " What to do: run without --replicas"
        )
    if STATE.is_spmd:
        raise UsageError(
            "torch_xla.launch was called after use_spmd(), where one process has all devices"
            " already. What to do: call the function itself"
        )
    multiprocessing.spawn(
        fn, args, nprocs=1 if debug_single_process else None, start_method=start_method
    )
