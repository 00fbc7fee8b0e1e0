"""Each wrong call is an error that says what to do."""

import numpy as np
import pytest
import torch
import torchax
from torch import nn

import tpuport
from tests.exactness.scenario import by_tpuport, normal
from tpuport.foundation.errors import UsageError

X = normal(4, 6)


def square(model, x):
    return model(x).square()


def test_wrong_call_converting():
    linear = nn.Linear(6, 3)
    with pytest.raises(UsageError, match=r"pass an instance: tpuport\.convert\(Linear\("):
        tpuport.convert(nn.Linear)
    with pytest.raises(UsageError, match=r"expected an nn\.Module or a function, got int"):
        tpuport.convert(3)
    with pytest.raises(UsageError, match="ported already"):
        tpuport.convert(by_tpuport(linear))
    with pytest.raises(UsageError, match=r"write methods=\('forward',\)"):
        tpuport.convert(linear, methods="forward")
    with pytest.raises(UsageError, match="has no such method"):
        tpuport.convert(linear, methods=("forward", "generate"))
    with pytest.raises(UsageError, match=r"a function is called by its name.*def loss\(model"):
        tpuport.convert(linear, methods=(lambda model, x: model(x),))
    with pytest.raises(UsageError, match="has the function 'square', and there is no module"):
        tpuport.convert(torch.sin, methods=(square,))
    with pytest.raises(TypeError, match="too many positional arguments; its signature is square"):
        tpuport.convert(linear, methods=(square,), args=(X, X))
    with pytest.raises(UsageError, match=r"write args=\(x,\)"):
        tpuport.convert(linear, args=X)
    with pytest.raises(UsageError, match="unexpected keyword argument 'mask'"):
        tpuport.convert(linear, args=(X,), kwargs={"mask": X})


def test_wrong_call_model_already_on_jax():
    env = torchax.default_env()
    with env:
        model = nn.Linear(6, 3).to("jax")
    with pytest.raises(UsageError, match=r"already on jax(.|\n)*before \.to\('jax'\)"):
        tpuport.convert(model)


class Angle(nn.Parameter):
    """A class of tensors that lets no function of torch at its values (hypll)."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ != "__get__":
            raise TypeError(func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args)


def test_wrong_call_classes_of_tensors():
    model = nn.Linear(6, 3)
    model.bias = torch.Tensor._make_subclass(Angle, torch.zeros(3), True)
    with pytest.raises(UsageError, match=r"bias is a Angle(.|\n)*plain tensor"):
        tpuport.convert(model)


@pytest.mark.parametrize(
    ("args", "kwargs", "kind", "message"),
    [
        (
            (),
            {},
            (UsageError, TypeError),
            "missing a required argument: 'input'|missing 1 required positional",
        ),
        ((X, X), {}, (UsageError, TypeError), "too many positional|takes 2 positional"),
        ((X.double(),), {}, RuntimeError, "same dtype|double != float"),
        ((X.long(),), {}, RuntimeError, "same dtype|long|Long"),
        ((X[:, :3],), {}, RuntimeError, "shapes cannot be multiplied|same reduction dim"),
        ((torch.empty(4, 6, device="meta"),), {}, UsageError, "meta device"),
        (
            (np.ones((4, 6), np.float32),),
            {},
            (TypeError, UsageError),
            "must be Tensor, not .*ndarray|numpy",
        ),
    ],
    ids=["missing", "too_many", "float64", "int64", "shape", "meta", "numpy"],
)
def test_wrong_call_arguments(args, kwargs, kind, message):
    with pytest.raises(kind, match=message):
        by_tpuport(nn.Linear(6, 3))(*args, **kwargs)


def test_wrong_call_apply():
    ported = by_tpuport(nn.BatchNorm1d(6))
    with pytest.raises(
        UsageError, match=r"no value for running_mean(.|\n)*buffers=ported\.buffers"
    ):
        ported.apply(ported.params, {}, None, X)
    with pytest.raises(UsageError, match="has no module"):
        _ = by_tpuport(lambda x: x).module


def test_wrong_call_int64_that_does_not_fit():
    big = torch.tensor([2**40])
    with pytest.raises(UsageError, match=r"argument .*2\*\*31|does not fit|int32"):
        by_tpuport(lambda x: x + 1)(big)


def test_wrong_call_lazy_module_without_shapes():
    with pytest.raises((UsageError, ValueError), match=r"(?i)lazy|uninitialized"):
        tpuport.convert(nn.LazyLinear(3))(X)
