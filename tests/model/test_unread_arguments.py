"""A string or number that a call only carries along compiles nothing again."""

import contextlib
import copy
import json
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import tpuport
from tpuport.compat.emulated.programs import programs
from tpuport.foundation.pytree.sealed import SealedTrace, WasRead

WORDS = ("aa", "bbb", "special", "cccc")


@dataclass
class Batch:
    image: torch.Tensor
    paths: list
    step: int


def kept(x, **rest):
    return x if rest["name"] is None else x * 2


class Carries(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, batch, label, scale=1.5, *, extra=None):
        y = self.norm(batch.image)
        y = kept(y, name=label) if y.sum() > 100 else kept(y, name=extra)
        return y, [batch.image]


def carried(word):
    batch = Batch(torch.randn(4, 3), [f"{word}.png", word], len(word))
    return (batch, word, len(word) / 2), {"extra": {"name": word.encode()}}


def test_values_that_nothing_reads_compile_nothing_again():
    model = Carries()
    eager = copy.deepcopy(model)
    ported = tpuport.convert(model)
    for word in (*WORDS, "aa"):
        args, kwargs = carried(word)
        torch.testing.assert_close(
            tpuport.to_torch(ported(*args, **kwargs)), eager(*args, **kwargs)
        )
    torch.testing.assert_close(
        tpuport.to_torch(ported.buffers["norm.running_mean"]), eager.norm.running_mean
    )
    assert ported.report.retraces == []


def test_paths_in_the_batches_of_a_script_compile_nothing_again():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(3, 1)

        def forward(self, batch, step):
            return self.line(batch["image"]).square().mean()

    def trained(model, to):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            image = torch.arange(6.0).reshape(2, 3) + step
            optimizer.zero_grad()
            model({"image": to(image), "path": [f"{step}.png", f"{step}.jpg"]}, step).backward()
            optimizer.step()
        return model.line.weight.detach()

    model = Loss()
    expected = trained(copy.deepcopy(model), lambda x: x)
    with tpuport.porting():
        ported = model.cuda()
        torch.testing.assert_close(trained(ported, lambda x: x.cuda()).cpu(), expected)
        assert [program.report.retraces for program in programs()] == [[]]


def test_a_structure_that_differs_is_another_program():
    ported = tpuport.convert(lambda x, names: x * len(names))
    for names in (["a"], ["b"], ["a", "b"], {"a": "b"}, {"b": "c"}):
        assert float(ported(torch.ones(1), names)) == len(names)


def of_type(x, word):
    return x * 2 if type(word) is str and word == "special" else x


def swallows(x, word):
    try:
        return x * float(word)
    except Exception:
        return x * 2 if word == "special" else x


SEEN = []


def remembered(x, word):
    SEEN[:] = [word]
    return x * 2


READS = {
    "==": lambda x, s: x * 2 if s == "special" else x,
    "!=": lambda x, s: x if s != "special" else x * 2,
    "<": lambda x, s: x * 2 if s > "s" else x,
    "hash": lambda x, s: x * {"special": 2.0}.get(s, 1.0),
    "in a list": lambda x, s: x * 2 if s in ["special", "b"] else x,
    "in a string": lambda x, s: x * 2 if s in "special" else x,
    "contains": lambda x, s: x * 2 if "pecia" in s else x,
    "len": lambda x, s: x * len(s),
    "format": lambda x, s: x * 2 if f"{s}" == "special" else x,
    "percent": lambda x, s: x * 2 if "%s" % s == "special" else x,  # noqa: UP031
    "join": lambda x, s: x * 2 if "".join([s]) == "special" else x,
    "plus": lambda x, s: x * len("a" + s),
    "method": lambda x, s: x * 2 if s.startswith("spec") else x,
    "startswith": lambda x, s: x * 2 if "special one".startswith(s) else x,
    "index": lambda x, s: x * ord(s[0]),
    "iter": lambda x, s: x * sum(map(ord, s)),
    "isinstance": lambda x, s: x * 2 if isinstance(s, str) and s == "special" else x,
    "match": lambda x, s: x * 2 if isinstance(s, (int, bytes)) or s == "special" else x,
    "type": of_type,
    "json": lambda x, s: x * len(json.dumps(s)),
    "number": lambda x, s: x * len(s) ** 2,
    "returned": lambda x, s: {"x": x, "s": s},
    "swallowed": swallows,
    "text of a check": lambda x, s: x * 2 if repr(s) == "'special'" else x,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_is_read_decides_about_the_program(read):
    ported = tpuport.convert(read, verify=False)
    x = torch.ones(2)
    for word in WORDS:
        ours, theirs = ported(x, word), read(x, word)
        if isinstance(theirs, dict):
            assert ours["s"] == word
            ours, theirs = ours["x"], theirs["x"]
        torch.testing.assert_close(tpuport.to_torch(ours), theirs)


def test_numbers_that_torch_reads_decide_about_the_program():
    def read(x, scale, places, power):
        return torch.round(x * scale, decimals=places).clamp(max=power)

    ported = tpuport.convert(read, verify=False)
    x = torch.linspace(0, 3, 7)
    for values in ((1.0, 1, 2), (1.5, 1, 2), (1.5, 2, 2), (1.5, 2, 1.75)):
        torch.testing.assert_close(tpuport.to_torch(ported(x, *values)), read(x, *values))


def test_a_list_outside_that_keeps_the_string_is_right():
    ported = tpuport.convert(remembered, verify=False)
    for word in WORDS[:2]:
        ported(torch.ones(2), word)
        assert SEEN == [word]


class Log:
    def __init__(self):
        self.lines = []


def test_what_no_guard_sees_keeps_no_sealed_value():
    logs = {"one": Log()}

    def logged(x, word):
        list(logs.values())[0].lines.append(word)  # noqa: RUF015
        return x * 2

    ported = tpuport.convert(logged, verify=False)
    for word in WORDS[:3]:
        with contextlib.suppress(tpuport.PortError):
            ported(torch.ones(2), word)
    assert {f"{line}!" for line in logs["one"].lines} <= {f"{word}!" for word in WORDS}


class Remembers(nn.Module):
    def forward(self, x, word):
        self.last = word
        return x * 2


def test_an_attribute_that_keeps_the_string_is_right():
    ported = tpuport.convert(Remembers(), verify=False)
    for word in WORDS[:3]:
        ported(torch.ones(2), word)
        assert ported.module.last == word


def test_a_sealed_value_is_its_value_after_the_trace():
    trial = SealedTrace(())
    one = trial.seal("word")
    with pytest.raises(WasRead):
        str(one)
    trial.is_running = False
    assert [one, f"{one}s", one + "s", one.upper()] == ["word", "words", "words", "WORD"]
    assert hash(one) == hash("word")
    assert isinstance(one, str)
    assert trial.reads == ["__str__"]
