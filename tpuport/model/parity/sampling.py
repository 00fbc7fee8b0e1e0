"""Comparison of some calls with eager PyTorch, chosen at random, while the program runs on."""

import random
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tpuport.foundation.errors import ParityError
from tpuport.model.parity.bisect import fail
from tpuport.model.parity.call import Call, kept
from tpuport.model.parity.same_numbers import SameNumbers
from tpuport.model.parity.verify import Verifier, buffers, outputs
from tpuport.reports.records import Parity

# The largest share of the time that comparing takes.
_SHARE = 0.03
# OpenMP has a number of threads for each thread: the first question takes over the one that
# `torch.set_num_threads` set, and without it kernels use all cores, and wait for each other.
_WORKER = ThreadPoolExecutor(
    1, thread_name_prefix="tpuport-verify", initializer=torch.get_num_threads
)


class Sampler:
    """Compares a call now and then, on a thread of its own: nothing waits for it.

    Which call it is depends on the time that comparing takes and on random numbers of its own. A
    call under a dispatch mode or autocast is left out, as these belong to the caller's thread.

    Attributes:
        calls: How many calls there were after the first one.
    """

    def __init__(self, verifier: Verifier, seed: int = 0) -> None:
        # The main thread may be comparing with the other one.
        self._verifier = Verifier(verifier.ported, verifier.target, verifier.rtol)
        self._random = random.Random(seed)
        self._next = 0.0
        self._found: list[ParityError] = []
        self.calls = 0
        weakref.finalize(self, _complain, self._found)

    def is_due(self) -> bool:
        """Count a call, and return whether it is to be compared.

        Raises:
            ParityError: An earlier call differed.
        """
        self.calls += 1
        if self._found:
            ported = self._verifier.ported
            ported._verifier.done.clear()
            ported._bound.clear()
            raise self._found.pop()
        return time.monotonic() >= self._next and _is_plain()

    def wait_for(self, cost: float) -> None:
        """Choose when to compare next, after a comparison that took `cost` seconds."""
        self._next = time.monotonic() + cost / _SHARE * self._random.uniform(0.5, 1.5)

    def submit(self, call: Call, out: Any, given: Any, started: float) -> None:
        """Compare a call that has run, in the background.

        Args:
            call: The call as it was before.
            out: Its result.
            given: Its arguments after it.
            started: When it began. Its time counts: it went the general way of a call.
        """
        if call.draws_on_host:  # another thread would set the generators meanwhile
            return
        self._next = float("inf")  # one at a time
        after, found = self._verifier.ported._values(), kept((out, given))
        spent = time.monotonic() - started
        _WORKER.submit(self._compare, call, self.calls, found, after, spent)

    def _compare(self, call: Call, number: int, found: Any, after: Any, spent: float) -> None:
        started = time.monotonic()
        report = self._verifier.ported.report
        try:
            records = self._records(call, found, after)
            report.add_worst(*records)
            if not all(record.ok for record in records):
                report.verified = False
                fail(self._verifier, call, records)
        except ParityError as error:
            self._found.append(
                ParityError(f"call {number} of {call.method}: {error.message}", remedy=error.remedy)
            )
        except Exception as error:  # a donated array, or code that does not run on another thread
            report.notes.append(f"call {number} of {call.method} was not compared: {error}")
        finally:
            self.wait_for(spent + time.monotonic() - started)

    def _records(self, call: Call, found: Any, after: Any) -> list[Parity]:
        # Not `reference`: it restores the host's random numbers, which the program draws meanwhile.
        self._verifier.saves = self._verifier.ported._verifier.saves
        expected = self._verifier.seen(call, SameNumbers.of(call))
        out, given = found
        places = outputs(expected, out, given) + buffers(call, expected, after)
        return self._verifier.check(call, expected, places)


def _is_plain() -> bool:
    """Return whether this thread has no modes that another one would miss."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch.is_autocast_enabled("cpu")
    )


def _complain(found: list[ParityError]) -> None:
    """Say what was found after the last call."""
    for error in found:
        warnings.warn(f"tpuport: {error}", stacklevel=1)
