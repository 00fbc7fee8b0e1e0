"""Each cause against the exceptions it stands for: real ones, provoked here, and recorded ones."""

import inspect
import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torchax

from tests.diagnosis import faulty
from tests.exactness.plain_torchax import PlainTorchax
from tpuport.diagnosis.causes._cause import Raised, Recorded
from tpuport.diagnosis.explain import Diagnosis, explain_error, find_causes

RECORDED = [(name, one) for name, cause in find_causes().items() for one in cause.RECORDED]
# x is float32[4,3].
NO_VALUE = "Python needs the value of a traced tensor, which has none while the program is traced"
MIXED = "a plain CPU tensor meets a traced one, and torchax cannot compute with both"
TO_NUMPY = "a traced tensor is copied to NumPy, and it has no memory while the program is traced"
TO_TORCH = "a traced array is handed to torch, which needs its memory"

# Function, cause, the rule that finds the line, what is said, the start of the value.
UNDER_PLAIN_TORCHAX = [
    (faulty.branch, "traced-value", "TPU101", NO_VALUE, "bool[] computed from args[0] while pure"),
    (faulty.item, "traced-value", "TPU110", NO_VALUE, "float32[] computed from args[0]"),
    (faulty.as_list, "traced-value", "TPU110", NO_VALUE, "float32[4,3] computed from args[0]"),
    (faulty.size, "traced-value", "TPU111", NO_VALUE, "int32[] computed from args[0]"),
    (
        *(faulty.tensor_of, "traced-value", None),
        "torchax cannot make a number or a tensor out of a traced value here",
        None,
    ),
    (
        *(faulty.mask, "data-dependent-size", "TPU210"),
        "a boolean mask selects a number of elements that is unknown while the program is traced",
        "the mask bool[4,3]",
    ),
    (
        *(faulty.nonzero, "data-dependent-size", "TPU212"),
        "the size of the result of jnp.nonzero depends on data, which is unknown while the program"
        " is traced",
        "int32[] computed from args[0]",
    ),
    (faulty.numpy_copy, "host-copy", "TPU310", TO_NUMPY, "float32[4,3] computed from args[0]"),
    (faulty.handed_to_numpy, "host-copy", "TPU310", TO_NUMPY, "float32[4,3] computed from args[0]"),
    (faulty.mixed, "mixed-tensors", None, MIXED, None),
    (faulty.written, "mixed-tensors", None, MIXED, None),
    (faulty.added, "mixed-tensors", None, MIXED, None),
    (
        *(faulty.window, "missing-lowering", None),
        "torchax has no lowering for aten::hann_window",
        None,
    ),
]
BY_THEMSELVES = [
    (
        *(faulty.to_jax, "mixed-tensors"),
        'torch was asked for the device "jax", which only torchax\'s environment knows',
        None,
    ),
    (
        *(faulty.outside, "outside-environment"),
        "a tensor of torchax is used outside of torchax's environment",
        None,
    ),
    (
        *(faulty.into_jax, "foreign-tensor"),
        "a torch tensor is given to a function of jax",
        "the argument a",
    ),
    (
        *(faulty.into_torch, "foreign-tensor"),
        "a jax array is given to a function of torch",
        "the 'input' (position 1) argument",
    ),
    *(
        (
            *(function, "dtype-mismatch"),
            f"the operands have different dtypes, {first} and {second}",
            None,
        )
        for function, first, second in (
            (faulty.linear_dtypes, "float32", "bfloat16"),
            (faulty.product_dtypes, "float32", "bfloat16"),
            (faulty.convolution_dtypes, "float16", "float32"),
            (faulty.target_dtype, "int64 or uint8", "int32"),
            (faulty.added_dtypes, "float32", "int32"),
            (faulty.scanned_dtypes, "float32[2]", "bfloat16[2]"),
            (faulty.branch_dtypes, "float32[2]", "bfloat16[2]"),
        )
    ),
    (
        *(faulty.too_much, "out-of-memory"),
        "an array needs 32.0 TiB of memory, more than there is",
        None,
    ),
    (
        *(faulty.too_much_for_torch, "out-of-memory"),
        "an array needs 256.0 TiB of memory, more than there is",
        None,
    ),
    (
        faulty.to_cuda,
        "cuda-missing",
        "the code asks for CUDA, which this machine does not have",
        None,
    ),
    (
        faulty.donated,
        "deleted-array",
        "an array is used after its memory was donated or freed",
        "float32[4]",
    ),
    (
        *(faulty.two_devices, "device-mismatch"),
        "the arguments of one computation are on different devices",
        None,
    ),
    (
        *(faulty.six_over_four, "uneven-sharding"),
        "dimension 0 has 6 elements, which 4 chips cannot share evenly",
        None,
    ),
]


def diagnosis_of(call: Callable[..., Any], *args: Any) -> Diagnosis:
    """What is said about the exception that a call raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 (each function has its own)
        call(*args)
    diagnosis = explain_error(caught.value)
    assert diagnosis is not None, repr(caught.value)
    return diagnosis


def check_place(diagnosis: Diagnosis, function: Callable[..., Any]) -> None:
    """The line is one of the function's."""
    assert Path(diagnosis.file or "").name == "faulty.py"
    lines, start = inspect.getsourcelines(function)
    assert diagnosis.line in range(start + 1, start + len(lines))
    assert diagnosis.source_line == linecache.getline(faulty.__file__, diagnosis.line).strip()


@pytest.mark.parametrize(
    ("function", "cause", "rule", "problem", "value"),
    UNDER_PLAIN_TORCHAX,
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_what_stops_a_trace_is_explained(function, cause, rule, problem, value):
    diagnosis = diagnosis_of(PlainTorchax(function), torch.ones(4, 3))
    check_place(diagnosis, function)
    assert (diagnosis.cause, diagnosis.rule, diagnosis.problem) == (cause, rule, problem)
    assert (diagnosis.value or "").startswith(value or "")
    assert (diagnosis.value is None) == (value is None)


@pytest.mark.parametrize(
    ("function", "cause", "problem", "value"),
    BY_THEMSELVES,
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_what_fails_outside_of_a_trace_is_explained(function, cause, problem, value):
    diagnosis = diagnosis_of(function)
    check_place(diagnosis, function)
    assert (diagnosis.cause, diagnosis.problem, diagnosis.value) == (cause, problem, value)


@pytest.mark.parametrize(
    ("function", "argument", "problem"),
    [
        (faulty.index_by, 1, NO_VALUE),
        (faulty.handed_to_torch, jnp.ones(3), TO_TORCH),
        (
            *(faulty.reshaped, 2),
            "a shape is given by a traced number, and shapes are fixed when the program is traced",
        ),
    ],
)
def test_functions_of_jax_are_explained(function, argument, problem: str):
    diagnosis = diagnosis_of(jax.jit(function), argument)
    check_place(diagnosis, function)
    assert diagnosis.problem == problem


def test_a_named_tuple_that_a_program_returns_is_explained():
    diagnosis = diagnosis_of(PlainTorchax(faulty.named_tuple), torch.ones(4, 3))
    assert diagnosis.problem == (
        "the program returns the named tuple of torch.linalg_qr, which jax cannot flatten"
    )


def test_a_leaked_value_is_traced_back_to_the_function_that_kept_it():
    PlainTorchax(faulty.leak)(torch.ones(4, 3))
    try:
        diagnosis = diagnosis_of(PlainTorchax(faulty.use_leak), torch.ones(4, 3))
    finally:
        faulty.KEPT.clear()
    assert (diagnosis.cause, diagnosis.value) == ("leaked-tracer", "float32[4,3]")
    assert diagnosis.details == (
        f"while pure ({inspect.getsourcefile(PlainTorchax)}:"
        f"{inspect.getsourcelines(PlainTorchax.pure)[1]}) was traced for jit",
    )


def test_a_value_that_a_function_of_jax_leaked_has_the_line_where_it_was_made():
    kept = []

    def keep(a):
        kept.append(a * 2)
        return a

    jax.jit(keep)(jnp.ones(3))
    diagnosis = diagnosis_of(lambda: kept[0] + 1)
    line = inspect.getsourcelines(keep)[1]
    assert diagnosis.details[0].startswith(f"made at {__file__}:{line + 1} in ")
    assert diagnosis.details[0].endswith("keep")


def test_torchaxs_own_key_is_told_from_other_leaks():
    with torchax.default_env() as env:
        env.manual_seed(0)
        program = jax.jit(
            lambda a: torchax.interop.jax_view(faulty.dropped(torchax.interop.torch_view(a)))
        )
        try:
            program(jnp.ones(3))
            diagnosis = diagnosis_of(program, jnp.ones(4))
        finally:
            env.manual_seed(0)
    assert diagnosis.problem == (
        "the key of torchax's random generator was left inside an earlier trace"
    )
    assert diagnosis.value == "uint32[2]"


# Recorded exceptions: those that need a TPU, or another machine.


def explained_by(recorded: Recorded) -> dict[str, str]:
    """The causes that take a recorded exception for theirs, and what they say."""
    raised = recorded.raised()
    said = {name: cause.explain(raised) for name, cause in find_causes().items()}
    return {name: one.problem for name, one in said.items() if one is not None}


@pytest.mark.parametrize(
    ("name", "recorded"), RECORDED, ids=[f"{n}-{r.message[:30]}" for n, r in RECORDED]
)
def test_a_recorded_exception_has_one_cause(name: str, recorded: Recorded):
    assert explained_by(recorded) == {name: recorded.shows}


def test_every_cause_has_recorded_exceptions_and_a_page():
    for name, cause in find_causes().items():
        assert cause.RECORDED, name
        title, _, body = (inspect.getdoc(type(cause)) or "").partition("\n\n")
        assert title.endswith("."), name
        assert body, name


def test_every_rule_that_a_cause_names_exists():
    from tpuport.rules._discovery import find_rules

    codes = {rule.CODE for rule in find_rules()}
    for name, cause in find_causes().items():
        assert set(cause.RULES) <= codes, name


@pytest.mark.parametrize(
    "error",
    [
        ValueError("shapes (3,) and (4,) do not match"),
        KeyError("model.weight"),
        RuntimeError(""),
        TypeError("scan body function carry input and carry output must have equal types, but they"
                  " differ:\n\nThe input carry c has type float32[2] but the corresponding output"
                  " carry component has type float32[3], so the shapes do not match."),
        AttributeError("'Config' object has no attribute 'hidden_size'"),
    ],
)  # fmt: skip
def test_an_exception_without_a_known_cause_is_left_alone(error: Exception):
    assert explain_error(error) is None


def shown(name: str, start: str) -> Any:
    """What a cause says about the first recorded exception whose text starts so."""
    (recorded,) = (r for n, r in RECORDED if n == name and r.message.startswith(start))
    raised = Raised((recorded.name, "builtins.Exception"), recorded.message)
    return find_causes()[name].explain(raised)


def test_the_largest_buffers_are_those_of_the_compilers_list():
    hbm = shown("out-of-memory", "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of"
                " memory in memory space hbm")  # fmt: skip
    assert hbm.details == (
        "largest buffers: 2.00 GiB f32[32,4096,4096] by jit(step)/transformer/h/0/dot_general at"
        " /src/attention.py:1059",
    )
    vmem = shown("out-of-memory", "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of"
                 " memory in memory space vmem")  # fmt: skip
    assert vmem.details == (
        "largest buffers: 128.0 MiB u8[134217728] by jit(<lambda>)/pallas_call (input window"
        " allocation for operator input 0)",
    )
    assert "Pallas" in vmem.remedies[0]
    assert "smaller" in hbm.remedies[0]


def test_a_held_tpu_names_the_process():
    held = shown("tpu-unavailable", "Unable to initialize backend 'tpu': ABORTED")
    assert held.remedies[0] == "see which one it is and end it: ps -fp 176028"
