"""Text that code makes of numbers of the program: shown, or used as a name or key."""

import contextlib
import sys

import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import PortError
from tpuport.source.rewrite.text_use import is_looked_at


class Counts(nn.Module):
    """Counts its calls, so that the count is a number of the program from the third call on."""

    def __init__(self):
        super().__init__()
        self.steps, self.kept = 0, {}
        self.l0, self.l1 = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        self.steps += 1
        return self.used(x * self.steps)


class OfKeys(Counts):
    def used(self, x):
        key = f"k{self.steps % 2}"
        self.kept[key] = x
        return x + len(self.kept)


class OfNames(Counts):
    def used(self, x):
        return getattr(self, f"l{self.steps % 2}")(x)


class Compared(Counts):
    def used(self, x):
        return x * 2 if f"n{self.steps % 2}" == "n1" else x


class Shown(Counts):
    def used(self, x):
        text = f"step {self.steps}"
        sys.stderr.write(text + f" of {self.steps}")
        return x


@pytest.mark.parametrize("kind", [OfKeys, OfNames, Compared, Shown])
def test_text_of_a_count_means_what_it_means_in_eager(kind):
    torch.manual_seed(0)
    net = kind()
    ported = tpuport.convert(net)
    for _ in range(6):
        x = torch.ones(2)
        torch.testing.assert_close(ported(x).cpu(), net(x))
    assert set(net.kept) == set(ported.module.kept)


class ShowsFormats(nn.Module):
    """Shows numbers of the program in formats, and raises with one."""

    def forward(self, x):
        total, count = x.sum().item(), int((x > 0).sum())
        sys.stderr.write(f"{total:.2f} {count:3d} {total:>8} {count > 1!s:>5}")
        sys.stderr.write("{:.1e} of {:d}".format(total, count))  # noqa: UP032 - the other way
        if total > 100:
            raise ValueError(f"too large: {total:.1e}")
        return x * count


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_formats_of_numbers_are_shown(scale: float):
    eager, ported = ShowsFormats(), tpuport.convert(ShowsFormats())
    for x in (torch.tensor([1.0, -2, 4]), torch.tensor([3.0, 2, 4])):
        torch.testing.assert_close(tpuport.to_torch(ported(x * scale)), eager(x * scale))
    with pytest.raises(ValueError, match="too large"):
        ported(torch.full((3,), 50.0))


class OfFormats(Counts):
    def used(self, x):
        return x * 2 if f"n{self.steps % 2:02d}" == "n01" else x


def test_a_format_that_is_compared_has_the_number():
    eager, ported = OfFormats(), tpuport.convert(OfFormats())
    for _ in range(5):
        torch.testing.assert_close(tpuport.to_torch(ported(torch.ones(2))), eager(torch.ones(2)))


class Keeps(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.kept, self.part = {}, part

    def forward(self, x):
        count = int((x > 0).sum())
        self.kept[self.part(count)] = x
        return x * 2


def named(number):
    return "k" + "-".join([f"number {number}"])


def test_a_key_that_depends_on_the_inputs_is_refused():
    with pytest.raises(PortError, match="a name or key that depends on") as caught:
        tpuport.convert(Keeps(named))(torch.ones(3))
    assert caught.value.code == "TPU103"
    assert caught.value.source_line.strip() == 'return "k" + "-".join([f"number {number}"])'


SOURCES = {
    'table[f"k{NUMBER}"]': True,
    'f"k{NUMBER}" in ("k1", "k2")': True,
    '"k{}".format(NUMBER) == "k1"': True,
    'getattr(table, "k" + f"{NUMBER}1", None)': True,
    'f"k{NUMBER}".startswith("k1")': True,
    '{f"k{NUMBER}": 1}': True,
    "len(str(NUMBER))": True,
    'print(f"k{NUMBER}")': False,
    'log.info("k{}".format(NUMBER))': False,
    'name = f"k{NUMBER}"; print(name)': False,
    'name = f"k{NUMBER}"; table[name]': True,
    'name: str = f"k{NUMBER}"; table.get(name)': True,
    'raise ValueError(f"k{NUMBER}")': False,
    'assert not NUMBER, f"k{NUMBER}"': False,
}


@pytest.mark.parametrize("source", SOURCES)
def test_which_text_is_looked_at(source, tmp_path):
    found = []

    class Number:
        def __str__(self):
            frame = sys._getframe(1)
            found.append(is_looked_at(frame.f_code, frame.f_lasti))
            return "1"

    class Log:
        def info(self, text):
            del text

    path = tmp_path / "script.py"
    path.write_text(source)
    names = {"NUMBER": Number(), "table": {"k1": 1}, "log": Log()}
    with contextlib.suppress(ValueError, AssertionError):
        exec(compile(source, path, "exec"), names)
    assert found == [SOURCES[source]]


class Named(torch.Tensor):
    def __repr__(self) -> str:
        return super().__repr__().replace("tensor", "named").strip()


class ShowsInError(nn.Module):
    def forward(self, x):
        y = x.as_subclass(Named)
        if not (y < 9).all():
            raise ValueError(f"too large: {y!r}")
        return y * 2


def test_a_repr_may_shape_the_text_of_a_tensor_that_an_error_shows():
    ported = tpuport.convert(ShowsInError())
    for x in (torch.ones(2), torch.arange(2.0)):
        torch.testing.assert_close(tpuport.to_torch(ported(x)).as_subclass(torch.Tensor), x * 2)
    with pytest.raises(ValueError, match="too large"):
        ported(torch.full((2,), 10.0))
