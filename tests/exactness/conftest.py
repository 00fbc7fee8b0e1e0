"""Numbers to the last bit are compared of programs that are compiled as users compile them."""

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from _pytest.mark.expression import Expression
from jax._src import compiler

# Before a file of tests imports torchax, which says then that torch has an accelerator: scripts
# that run in eager PyTorch afterwards would use it.
import tpuport.foundation.interop.backend  # noqa: F401
from benchmarks.newer_versions import fusion_emitters

# What tests/conftest.py turned off and one program can ask for again. The number of LLVM modules
# stays at one: it is read once a process, and decides how a program is compiled, not what it
# computes.
_AS_BY_DEFAULT = fusion_emitters(used=True)
# Here what XLA folds, fuses and reorders may show: rounding, poles, ties and whole numbers.
# Errors, draws, guards, what a call leaves behind, which elements a write or a mask reaches and
# what has a gradient are the same however XLA rounds. `make test-all` compiles all as users do.
_OF_ROUNDING = {
    *("test_attention", "test_numbers", "test_special_points", "test_untaken"),
    "test_whole_programs",
}


@pytest.fixture(scope="module", autouse=True)
def _optimised(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.path.stem not in _OF_ROUNDING and not _runs_slow_tests(request.config):
        yield
        return
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    options_of = compiler.get_compile_options

    def with_defaults(*given: Any, **options: Any) -> Any:
        overrides = options.pop("env_options_overrides", None) or {}
        return options_of(*given, env_options_overrides=_AS_BY_DEFAULT | overrides, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", with_defaults)
        yield
    jax.config.update("jax_disable_most_optimizations", before)


def _runs_slow_tests(config: pytest.Config) -> bool:
    """Return whether `-m` lets slow tests run, whatever it says of other marks."""
    asked = config.option.markexpr.strip()
    return not asked or Expression.compile(asked).evaluate(lambda name, **_: name == "slow")
