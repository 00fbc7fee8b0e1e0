"""Explanations as users meet them: a note on their own exception, once, and otherwise as it was."""

import linecache
import pickle
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import tpuport
from tests.diagnosis import faulty
from tests.exactness.plain_torchax import PlainTorchax
from tpuport.diagnosis.explain import add_explanation, find_causes

NO_CUDA = "Torch not compiled with CUDA enabled"


def notes(error: BaseException) -> list[str]:
    """The notes that tpuport added."""
    return [note for note in getattr(error, "__notes__", ()) if note.startswith("tpuport explains")]


def raised_in_block(function: Any, *args: Any) -> BaseException:
    """The exception that leaves a block of `explaining`."""
    with pytest.raises(Exception) as caught, tpuport.explaining():  # noqa: PT011
        function(*args)
    return caught.value


def test_the_whole_text():
    with pytest.raises(TypeError) as caught:
        PlainTorchax(faulty.branch)(torch.ones(4, 3))
    lines = Path(faulty.__file__).read_text(encoding="utf-8").splitlines()
    line = lines.index("    if x.sum() > 0:") + 1
    code = PlainTorchax.pure.__code__
    pure = f"{code.co_filename}:{code.co_firstlineno}"
    assert str(tpuport.explain_error(caught.value)) == "\n".join(
        [
            f"{faulty.__file__}:{line}: Python needs the value of a traced tensor, which has none"
            " while the program is traced",
            "    if x.sum() > 0:",
            f"The value: bool[] computed from args[0] while pure ({pure}) is traced for jit",
            "The rule: TPU101 Python branches on `x.sum() > 0`, which has no value while the"
            " program is traced (`tpuport explain TPU101`)",
            "What to do: port the model with tpuport.convert(model) in place of a jax.jit around"
            " torchax: it rewrites such lines in a copy and proves that the results are the same",
            "            or have the line rewritten in the file itself: tpuport rewrite"
            f" {faulty.__file__}",
        ]
    )


def test_the_exception_stays_what_it_was():
    original = AssertionError(NO_CUDA)

    def fail():
        raise original

    error = raised_in_block(fail)
    assert error is original
    assert error.args == (NO_CUDA,)
    assert [f.name for f in traceback.extract_tb(error.__traceback__)][-1] == "fail"
    (note,) = notes(error)
    assert note.startswith(f"tpuport explains (cuda-missing): {__file__}:")
    assert note in "".join(traceback.format_exception(error))


def test_nested_blocks_add_one_note():
    def inner():
        with tpuport.explaining():
            faulty.to_cuda()

    error = raised_in_block(inner)
    assert len(notes(error)) == 1
    assert add_explanation(error)
    assert len(notes(error)) == 1
    assert len(notes(pickle.loads(pickle.dumps(error)))) == 1


def test_an_exception_raised_from_another_is_seen_through():
    def wrap(explicitly: bool):
        try:
            faulty.to_cuda()
        except AssertionError as error:
            if explicitly:
                raise ValueError("the model did not load") from error
            raise ValueError("the model did not load")  # noqa: B904

    for explicitly in (True, False):
        error = raised_in_block(wrap, explicitly)
        assert isinstance(error, ValueError)
        (note,) = notes(error)
        assert "cuda-missing" in note
        assert "return torch.ones(2).cuda()" in note


def test_one_that_was_set_aside_is_not_the_cause():
    def wrap():
        try:
            faulty.to_cuda()
        except AssertionError:
            raise ValueError("the model did not load") from None

    assert notes(raised_in_block(wrap)) == []


def test_a_note_on_an_exception_behind_is_enough():
    def wrap():
        try:
            with tpuport.explaining():
                faulty.to_cuda()
        except AssertionError as error:
            raise ValueError("the model did not load") from error

    error = raised_in_block(wrap)
    assert notes(error) == []
    assert len(notes(error.__cause__ or error)) == 1


def test_a_group_is_looked_into():
    def fail():
        raise ExceptionGroup("workers", [ValueError("x"), AssertionError(NO_CUDA)])

    error = raised_in_block(fail)
    assert isinstance(error, ExceptionGroup)
    assert "cuda-missing" in notes(error)[0]


def test_a_circle_of_exceptions_ends():
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert tpuport.explain_error(one) is None


def test_tpuports_own_errors_explain_themselves():
    error = tpuport.PortError("cannot", remedy="do that")
    error.__cause__ = AssertionError(NO_CUDA)
    assert tpuport.explain_error(error) is None


def test_ends_of_a_process_are_not_looked_at():
    with pytest.raises(SystemExit) as caught, tpuport.explaining():
        raise SystemExit(NO_CUDA)
    assert notes(caught.value) == []


def test_an_exception_without_a_traceback_or_a_readable_file_is_explained_too():
    assert str(tpuport.explain_error(AssertionError(NO_CUDA)) or "").startswith(f"{__file__}:")
    names: dict[str, Any] = {"torch": torch}
    exec(compile("def f():\n    torch.ones(1).cuda()", "<cell 3>", "exec"), names)
    with pytest.raises(AssertionError) as caught:
        names["f"]()
    diagnosis = tpuport.explain_error(caught.value)
    assert diagnosis is not None
    assert (diagnosis.file, diagnosis.line, diagnosis.source_line) == ("<cell 3>", 2, None)


def test_a_cause_that_fails_does_not_take_the_place_of_the_exception(monkeypatch):
    def fail(raised: object) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(find_causes()["cuda-missing"], "explain", fail)
    error = raised_in_block(faulty.to_cuda)
    assert str(error) == NO_CUDA
    assert notes(error) == ["tpuport explains nothing: KeyError: 'bug'"]


# Inside a ported model.


class Deleted(torch.nn.Module):
    """Hands a jax array that is gone to a function of jax."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step(x)
        return x


def step(x: torch.Tensor) -> Any:
    return jax.jit(lambda a: a)(torch.ones(3))


def test_an_exception_that_leaves_a_ported_call_has_the_users_line():
    ported = tpuport.convert(Deleted(), verify=False)
    for call in (
        lambda: ported(torch.ones(2)),
        lambda: ported.apply(ported.params, ported.buffers, None, torch.ones(2)),
        lambda: ported.eval_shape(torch.ones(2)),
    ):
        with pytest.raises(TypeError, match="as an abstract array") as caught:
            call()
        (note,) = notes(caught.value)
        assert note.startswith(f"tpuport explains (foreign-tensor): {__file__}:")
        assert "\n    return jax.jit(lambda a: a)(torch.ones(3))\n" in note


def test_an_exception_of_the_compiled_program_has_the_line_of_the_call():
    ported = tpuport.convert(torch.nn.Linear(2, 2), verify=False)
    ported(torch.ones(1, 2))
    params = dict(ported.params)
    for value in params.values():
        value.delete()
    with pytest.raises(RuntimeError, match="deleted") as caught:
        ported(torch.ones(1, 2))  # here
    (note,) = notes(caught.value)
    assert note.startswith(f"tpuport explains (deleted-array): {__file__}:")
    assert "\n    ported(torch.ones(1, 2))  # here\n" in note


def test_advice_inside_a_ported_model_is_not_to_port_it():
    class Branches(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            jax.jit(lambda a: a if a > 0 else -a)(jnp.ones(()))
            return x

    with pytest.raises(TypeError) as caught:
        tpuport.convert(Branches(), verify=False)(torch.ones(2))
    diagnosis = tpuport.explain_error(caught.value)
    assert diagnosis is not None
    assert "tpuport.convert" not in " ".join(diagnosis.remedies)
    assert diagnosis.remedies[0].startswith("put this line into the model's own PyTorch code")


# Without the frameworks.


def test_explaining_loads_no_framework():
    code = textwrap.dedent(f"""
        import sys
        import tpuport
        class TracerBoolConversionError(TypeError):
            __module__ = "jax.errors"
        def step():
            raise TracerBoolConversionError("traced array with shape bool[2]")
        try:
            with tpuport.explaining():
                step()
        except TypeError as error:
            print(error.__notes__[0].splitlines()[0])
        assert not {{"torch", "jax", "numpy"}} & set(sys.modules)
        sys.modules.update(dict.fromkeys(("torch", "jax", "numpy")))
        print(tpuport.explain_error(AssertionError({NO_CUDA!r})).cause)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.startswith("tpuport explains (traced-value): <string>:7: Python needs")
    assert second == "cuda-missing"


def test_a_file_of_the_user_may_have_torchax_in_its_name(tmp_path: Path):
    path = tmp_path / "my_torchax_port.py"
    path.write_text("import torch\n\ndef f():\n    torch.ones(1).cuda()\n")
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    with pytest.raises(AssertionError) as caught:
        names["f"]()
    diagnosis = tpuport.explain_error(caught.value)
    assert diagnosis is not None
    assert (diagnosis.file, diagnosis.line, diagnosis.rule) == (str(path), 4, "TPU510")


# A line of tpuport or torchax that fails.


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() + 1


@pytest.mark.parametrize(
    ("line", "explained"),
    [
        ("none.aval", True),
        ("{}['key']", True),
        ("assert traced is None", True),
        ("unknown(traced)", True),
        ("getattr(traced, 'given_by_the_script')", False),
        ("raise AttributeError('no such attribute')", False),
        ("torch.ones(2) + torch.ones(3)", False),
        ("torch.ones(2).sum(5)", False),
    ],
)
def test_a_fault_of_a_line_of_tpuport_is_said_to_be_one(
    line: str, explained: bool, monkeypatch: pytest.MonkeyPatch
):
    """What tpuport did not mean to raise is its fault; what torch says is the script's."""
    file = str(Path(tpuport.__file__).parent / "tracing" / "lowerings" / "a_fault.py")
    names: dict[str, Any] = {"torch": torch}
    source = f"def fail(traced):\n    none = None\n    {line}\n"
    exec(compile(source, file, "exec"), names)
    monkeypatch.setitem(linecache.cache, file, (len(source), None, source.splitlines(True), file))
    monkeypatch.setattr(torch.Tensor, "relu", names["fail"])
    with pytest.raises(Exception) as caught:  # noqa: PT011
        tpuport.convert(Net(), verify=False)(torch.ones(2))
    added = notes(caught.value)
    assert bool(added) == explained
    if explained:
        (note,) = added
        assert note.startswith(f"tpuport explains (unforeseen-error): {__file__}:")
        assert "the line: tpuport/tracing/lowerings/a_fault.py:3" in note
        assert "`tpuport run --eager Net`" in note
        assert "not of your code" in note
