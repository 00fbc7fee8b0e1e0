"""A transformers configuration that is decorated with @dataclass, as for transformers 4."""

import dataclasses
import pickle

import pytest

import tpuport

transformers = pytest.importorskip("transformers")


def declared(decorator, base):
    class Config(base):
        sizes: dict = dataclasses.field(default_factory=dict)
        width: int = 8
        names: list = dataclasses.field(default_factory=lambda: ["a"], compare=False)

    return decorator(Config)


def test_default_factories_hold_as_on_a_plain_base():
    plain = declared(dataclasses.dataclass, object)
    with tpuport.porting():
        ours = declared(dataclasses.dataclass, transformers.PretrainedConfig)
        also = declared(dataclasses.dataclass(), transformers.PretrainedConfig)
    for made in (ours, also):
        for arguments in ((), ({"a": 1},), ({}, 3, ["b"])):
            expected, got = plain(*arguments), made(*arguments)
            for name in ("sizes", "width", "names"):
                assert getattr(got, name) == getattr(expected, name)
        assert made().names is not made().names
        assert not {f.name: f for f in dataclasses.fields(made)}["names"].compare
        assert isinstance(made(), transformers.PretrainedConfig)


def test_other_classes_are_what_the_original_makes_of_them():
    original = dataclasses.dataclass
    with tpuport.porting():

        @dataclasses.dataclass(frozen=True)
        class Point:
            x: int
            y: list = dataclasses.field(default_factory=list)

        kept = dataclasses.dataclass
        with pytest.raises(TypeError, match="non-default argument"):

            @dataclasses.dataclass
            class Wrong:
                x: int = 0
                y: int

    assert Point(1) == Point(1, [])
    with pytest.raises(dataclasses.FrozenInstanceError):
        Point(1).x = 2
    assert dataclasses.dataclass is original
    # What user code imported it keeps, where it is the original again.
    with pytest.raises(TypeError, match="non-default argument"):
        declared(kept, transformers.PretrainedConfig)
    assert pickle.dumps(original)
