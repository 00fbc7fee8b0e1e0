"""Random modules give the same results and gradients after rewriting, to the last bit.

They are those of `benchmarks.whole_programs`; `TPUPORT_FUZZ` sets how many are rewritten.
"""

import os
import sys
import types
import warnings
from collections.abc import Iterator

import pytest
from torch import nn

from benchmarks.whole_programs import compare, judge
from benchmarks.whole_programs.judge import Result
from benchmarks.whole_programs.programs import Maker, Program
from tpuport.rules._apply import rewrite

FEW, MORE = 100, int(os.environ.get("TPUPORT_FUZZ", "2000"))
# Each was rewritten to what raises: `device=self.device`, and `.detach()` of a number.
ONCE_WRONG = (4006, 9179)


def loaded(source: str, program: Program) -> nn.Module:
    module = types.ModuleType("rewritten_program")
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, "<program>", "exec"), module.__dict__)
        return judge.ready(module.Model, program)
    finally:
        del sys.modules[module.__name__]


def results(module: nn.Module, program: Program) -> Iterator[Result]:
    """Yield what each call gives, and its gradients by the parameters and inputs."""
    for call in program.calls:
        before = judge.copied(module)
        yield judge.eager(module, call)
        for inputs in (True, False):
            yield judge.eager_gradients(judge.copied(before), call, None, inputs=inputs)


def check_rewriting(seed: int) -> bool:
    """Compare a program before and after; return whether it was rewritten."""
    program = Maker(seed).program()
    source = program.source()
    changed = rewrite(source)
    if not changed.applied:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        both = [results(loaded(text, program), program) for text in (source, changed.source)]
        for want, have in zip(*both, strict=True):
            assert type(want.error) is type(have.error), f"{have.error}\n{changed.source}"
            if want.error is not None:
                break
            compare.equal(want.values, have.values)
    return True


def test_rewritten_programs_are_the_same():
    assert sum(map(check_rewriting, (*range(FEW), *ONCE_WRONG))) > FEW // 4


# The fast sibling is the one above.
@pytest.mark.slow
def test_many_rewritten_programs_are_the_same():
    for seed in range(FEW, FEW + MORE):
        check_rewriting(seed)
