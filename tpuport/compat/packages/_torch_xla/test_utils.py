"""`torch_xla.test.test_utils`: what training scripts print."""

import time
from datetime import datetime
from typing import Any

from tpuport.compat.packages._torch_xla.metrics import counter_names, counter_value
from tpuport.tracing.core.errors import port_error

# From here on, each function is named and called as in torch_xla.


def mp_test(func: Any) -> Any:
    """Return the test itself: no process is needed to have an own device."""
    return func


def now(format: str = "%H:%M:%S") -> str:
    """Return the time of day."""
    return datetime.now().strftime(format)


def _show(*parts: str | None) -> None:
    print("|", " ".join(part for part in parts if part), flush=True)  # noqa: T201


def print_training_update(
    device: Any,
    step: Any,
    loss: Any,
    rate: float,
    global_rate: float,
    epoch: Any = None,
    summary_writer: Any = None,
) -> None:
    """Print a step's loss and rates."""
    _show(
        f"Training Device={device}/0",
        None if epoch is None else f"Epoch={epoch}",
        f"Step={step} Loss={loss:.5f} Rate={rate:.2f} GlobalRate={global_rate:.2f} Time={now()}",
    )
    rates = {"examples/sec": rate, "average_examples/sec": global_rate}
    write_to_summary(summary_writer, dict_to_write=rates)


def print_test_update(device: Any, accuracy: Any, epoch: Any = None, step: Any = None) -> None:
    """Print the accuracy of a test."""
    _show(
        f"Test Device={device}/0",
        None if step is None else f"Step={step}",
        None if epoch is None else f"Epoch={epoch}",
        None if accuracy is None else f"Accuracy={accuracy:.2f}",
        f"Time={now()}",
    )


def get_summary_writer(logdir: Any) -> Any:
    """Return a writer of TensorBoard's files, None without a folder."""
    if not logdir:
        return None
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise port_error(
            "get_summary_writer needs tensorboardX", remedy="pip install tensorboardX"
        ) from error
    writer = SummaryWriter(log_dir=logdir)
    write_to_summary(writer, 0, {"TensorboardStartTimestamp": time.time()})
    return writer


def write_to_summary(
    summary_writer: Any,
    global_step: Any = None,
    dict_to_write: dict[str, Any] | None = None,
    write_xla_metrics: bool = False,
) -> None:
    """Write numbers to TensorBoard's files, if there is a writer."""
    if summary_writer is None:
        return
    found = dict(dict_to_write or {})
    if write_xla_metrics:
        found |= {name: counter_value(name) for name in counter_names()}
    for name, value in found.items():
        summary_writer.add_scalar(name, value, global_step)


def close_summary_writer(summary_writer: Any) -> None:
    """Close a writer, if there is one."""
    if summary_writer is not None:
        summary_writer.flush()
        summary_writer.close()
