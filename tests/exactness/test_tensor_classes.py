"""Tensors of a class of the user's: class, attributes, values and gradients are eager's."""

import copy
import pickle

import pytest
import torch
from torch import nn

import tpuport
from tests.exactness.scenario import normal
from tpuport.foundation.errors import PortError

X = normal(2, 3)


class Named(torch.Tensor):
    """A tensor with names, as pina makes them: by `Tensor.__new__` and attributes."""

    @staticmethod
    def __new__(cls, x, names):
        return super().__new__(cls, x)

    def __init__(self, x, names):
        super().__init__()
        self._names = names

    def twice(self):
        return self * 2

    def clone(self, *args, **kwargs):
        return Named(super().clone(*args, **kwargs), list(self._names))

    def detach(self):
        made = super().detach()
        made._names = self._names
        return made


class Typed(torch.Tensor):
    """A tensor whose functions pass its kind on, as pypose and torch-hd do."""

    @staticmethod
    def __new__(cls, x, kind=None):
        return torch.Tensor.as_subclass(x, cls)

    def __init__(self, x, kind=None):
        self.kind = kind

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        made = super().__torch_function__(func, types, args, kwargs or {})
        kinds = [one.kind for one in args if isinstance(one, Typed) and hasattr(one, "kind")]
        if isinstance(made, Typed) and kinds and made is not args[0]:
            made.kind = kinds[0]
        return made


class SubNamed(Named):
    """A class below another one."""


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(3, 3), function

    def forward(self, *args):
        return self.function(self, *args)


class WithState(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(Typed(torch.randn(3), "w"))
        self.register_buffer("mean", Typed(torch.randn(3), "b"))

    def forward(self, x):
        self.mean += 1
        is_parameter = isinstance(self.weight, nn.Parameter)
        return x * self.weight, x + self.mean, self.mean, is_parameter, type(self.weight).__name__


def seen(value):
    """Return class, attributes and values of everything in a result."""
    if isinstance(value, torch.Tensor):
        kind = value.__class__
        plain = tpuport.to_torch(value.as_subclass(torch.Tensor)).detach()
        names = [n for n in ("_names", "kind", "other") if hasattr(value, n)]
        held = {name: seen(getattr(value, name)) for name in names}
        return kind, held, value.dtype, plain.clone()  # which a later call may write to
    if isinstance(value, (list, tuple)):
        return [seen(one) for one in value]
    if isinstance(value, dict):
        return {name: seen(one) for name, one in value.items()}
    return value


def same(have, want):
    """Return whether what `seen` returned is the same, but for rounding of float32."""
    if isinstance(want, torch.Tensor):
        return have.shape == want.shape and torch.allclose(have, want, rtol=1e-5, atol=1e-5)
    if isinstance(want, (list, tuple)):
        return len(have) == len(want) and all(map(same, have, want))
    if isinstance(want, dict):
        return have.keys() == want.keys() and all(same(have[n], want[n]) for n in want)
    return have == want


def gradients(model, out):
    found = out if isinstance(out, (list, tuple)) else [out]
    loss = [t.as_subclass(torch.Tensor) for t in found if isinstance(t, torch.Tensor)]
    loss = [t for t in loss if t.requires_grad and t.is_floating_point()]
    if not loss:
        return []
    model.zero_grad()
    sum((t**2).sum() for t in loss).backward()
    return [(n, type(p.grad), seen(p.grad)) for n, p in model.named_parameters()]


def check(make, *inputs):
    """Compare three ways: eager, `convert`, and `porting()` with gradients; all calls of each."""
    model, ported = make(), tpuport.convert(make())
    expected = [(seen(out := model(x)), gradients(model, out)) for x in inputs]
    assert same([seen(ported(x)) for x in inputs], [out for out, _ in expected])
    with tpuport.porting():
        model = make().cuda()
        found = [(seen(out := model(x.cuda())), gradients(model, out)) for x in inputs]
    assert same(found, expected)


def chain(self, x):
    y = Named(self.layer(x), ["a"])
    return y, y.relu() + 1, y.twice(), y[0], y.sum(), y.clone(), *y.split(1), y.data, y.detach()


def typed(self, x):
    y = Typed(self.layer(x), "so3")
    parts = torch.stack([y, y]), torch.cat([y, x]), y.as_subclass(torch.Tensor)
    return y, y.exp(), x + y, y.T, y.reshape(-1), y @ y.T, *parts


def written(self, x):
    y = Named(self.layer(x), ["a"])
    y += 1
    y.mul_(2)
    y[0] = 0
    return y, x * y


def subclasses(self, x):
    low, high = SubNamed(self.layer(x), ["s"]), Named(self.layer(x), ["n"])
    return low + high, high + low, x + high, type(low) is SubNamed, isinstance(low, Named)


def made(self, x):
    y = torch.Tensor._make_subclass(Typed, self.layer(x))
    z = torch.Tensor._make_subclass(Typed, self.layer(x), True)
    return y, z, y.requires_grad, z.requires_grad, (z**2).sum().requires_grad


def inner(self, x):
    y = Named(x.detach(), ["q"]).requires_grad_()
    return torch.autograd.grad((self.layer(y) ** 2).sum(), y), y.is_leaf, y.grad


def branch(self, x):
    y = Named(self.layer(x), ["a"])
    return y * 2 if y.sum() > 0 else y - 1


def rows(self, x):
    y = self.layer(x)
    for row in y:
        y = Typed(y + row, ["a"])
    return y


def held(self, x):
    y = Typed(self.layer(x), {"t": x.sum(), "n": [1, 2]})
    y.other = x * 3
    return y


def copied(self, x):
    return nn.functional.dropout(Typed(x, 1), 0.5, False), nn.functional.softmax(Typed(x), -1)


@pytest.mark.parametrize(
    "function",
    [chain, typed, written, subclasses, made, inner, branch, rows, held, copied],
    ids=lambda function: function.__name__,
)
def test_classes_made_in_a_call(function):
    check(lambda: Model(function), X, -X, X * 3)


def test_parameters_and_buffers_of_a_class():
    check(WithState, X, -X, X * 3)


def test_arguments_of_a_class_keep_it_and_one_with_other_attributes_is_another_program():
    def function(self, x):
        return self.layer(x), x, x.kind, x.T, type(x) is Typed

    check(lambda: Model(function), Typed(X, "p"), Typed(X * 2, "q"), Typed(X, ["z"]), Typed(X, "p"))


def test_attributes_that_a_call_sets_on_an_argument_are_set():
    def function(x):
        x.kind = "new"
        return x * 2

    given, expected = Typed(X, "old"), Typed(X, "old")
    assert same(seen(tpuport.convert(function)(given)), seen(function(expected)))
    assert same(seen(given), seen(expected))


def test_a_result_is_the_argument_and_sees_writes():
    given = Typed(X.clone(), "p")
    out = tpuport.convert(lambda x: x.add_(1))(given)
    assert same(seen(out), seen(given))
    assert same(seen(out), seen(Typed(X + 1, "p")))


def test_results_of_convert_go_on_as_tensors_of_the_class():
    out = tpuport.convert(lambda x: Typed(x * 2, "k"))(X)
    expected = Typed(X * 2, "k")
    assert isinstance(out, Typed)
    assert same(seen(out + 1), seen(expected + 1))
    assert same(seen(tpuport.to_torch(out)), seen(expected))
    assert type(tpuport.to_torch(out)) is Typed
    assert same(seen(pickle.loads(pickle.dumps(out))), seen(expected))
    assert same(seen(out.cpu()), seen(expected.cpu()))


class Sized(torch.Tensor):
    """A class with sizes of its own."""

    @property
    def shape(self):
        return torch.Size([7])


class Writer(torch.Tensor):
    """A class with a method of the tracer's name."""

    def write(self, value):
        return self + value


class Keeping(torch.Tensor):
    """A class that sets an attribute of the tracer's name."""

    def keep(self):
        self._storage = 3
        return self


class Operating(torch.Tensor):
    """A class that takes ATen ops."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Sized, "'shape' differs"),
        (Writer, "defines 'write'"),
        (Keeping, "keep uses '_storage'"),
        (Operating, "takes torch's operations"),
    ],
)
def test_a_class_that_a_trace_cannot_keep_is_refused_with_the_line(kind, reason):
    def function(x):
        return (x * 2).as_subclass(kind) + 1

    with pytest.raises(PortError, match=rf"test_tensor_classes.py:\d+: TPU106 .*{reason}"):
        tpuport.convert(function, verify=False)(X)


def test_an_attribute_with_a_name_of_the_tracer_is_refused():
    given = Typed(X)
    vars(given)["_chain"] = 1
    with pytest.raises(PortError, match=r"TPU106 .* an attribute '_chain'"):
        tpuport.convert(lambda x: x + 1, verify=False)(given)


def set_in_branch(self, x):
    y = Named(self.layer(x), ["a"])
    if y.sum() > 0:
        y._names = ["positive"]
    return y


def class_by_branch(self, x):
    y = self.layer(x)
    return Typed(y, "a") if y.sum() > 0 else y


@pytest.mark.parametrize("function", [set_in_branch, class_by_branch], ids=lambda f: f.__name__)
def test_a_class_or_attribute_that_a_branch_chooses_is_refused(function):
    ported = tpuport.convert(Model(function), verify=False)
    with pytest.raises(PortError, match="TPU101"):
        ported(X)


def test_a_tensor_of_a_class_in_an_attribute_is_refused_and_the_remedies_work():
    class Holder(nn.Module):
        def __init__(self, where):
            super().__init__()
            table = Typed(torch.ones(3), "t")
            if where == "attribute":
                self.table = table
            elif where == "buffer":
                self.register_buffer("table", table)
            else:
                self.table = table.as_subclass(torch.Tensor)

        def forward(self, x):
            return x * Typed(self.table, "t")

    with pytest.raises(PortError, match=r"TPU106 table is a Typed, .* in an attribute"):
        tpuport.convert(Holder("attribute"))(X)
    for remedy in ("buffer", "plain"):
        check(lambda remedy=remedy: Holder(remedy), X)


class TypedParameter(Typed, nn.Parameter):
    """A parameter that is a tensor of a class, too."""

    def __new__(cls, x, kind):
        return torch.Tensor._make_subclass(cls, x, True)


class Scaled(nn.Parameter):
    """A parameter of a class with a method and an attribute, which a model asks for."""

    factor = 3.0

    def __new__(cls, x, kind="a", requires_grad=True):
        made = super().__new__(cls, x, requires_grad)
        made.kind = kind
        return made

    def real(self):
        return self * self.factor


class OfParameters(nn.Module):
    """A module with parameters of classes, one of them changed in each call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.layer.weight = TypedParameter(torch.randn(3, 3), "w")
        self.scale = Scaled(torch.tensor([1.0, 2.0, 3.0]), "b")
        self.mean = Scaled(torch.ones(3), requires_grad=False)

    def forward(self, x):
        scale = self.scale.real() if isinstance(self.scale, Scaled) else self.scale
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
        kinds = [type(one).__name__ for one in self.parameters() if isinstance(one, nn.Parameter)]
        factor = len(self.scale.kind) + ("Scaled" in kinds) + ("TypedParameter" in kinds)
        return self.layer(x) * scale * self.mean.real() * factor, self.scale[1:], self.layer.weight


def test_parameters_of_a_class_keep_it():
    check(OfParameters, X, X * 2)
    model = tpuport.convert(OfParameters()).to_torch()
    assert [type(one) for one in model.parameters()][:2] == [Scaled, Scaled]
    assert type(model.layer.weight) is TypedParameter
    assert model.scale.kind == "b"


def test_the_class_of_a_parameter_cannot_change_in_a_call():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", Typed(torch.ones(3), "t"))

        def forward(self, x):
            self.table = self.table.as_subclass(torch.Tensor) + 1
            return x * self.table

    with pytest.raises(PortError, match="TPU402"):
        tpuport.convert(Changing(), verify=False)(X)


def _copied(made, of):
    made.__dict__ = copy.copy(of.__dict__)


def _deeply(made, of):
    made.__dict__ = copy.deepcopy(of.__dict__)


def _updated(made, of):
    made.__dict__.update(of.__dict__)


def _by_items(made, of):
    for name, value in vars(of).items():
        vars(made).setdefault(name, value)
    vars(made)["kind"] = vars(made).pop("kind", None)


@pytest.mark.parametrize("take", [_copied, _deeply, _updated, _by_items])
def test_a_result_takes_the_dict_of_attributes_of_an_operand(take):
    class Taking(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            made = super().__torch_function__(func, types, args, kwargs or {})
            if isinstance(made, Taking) and isinstance(args[0], Taking):
                take(made, args[0])
            return made

    def computed(x):
        x = x.as_subclass(Taking)
        x.kind = ["image"]
        y = torch.exp(x) * 2
        y.number = len(vars(y))
        return y, y.sum(1), sorted(vars(y))

    ported = tpuport.convert(computed, verify=False)
    for x in (X, X + 1):
        *expected, names = computed(x)
        *found, found_names = ported(x)
        assert found_names == names
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.__class__ is type(theirs) is Taking
            assert ours.kind == theirs.kind == ["image"]
            plain = tpuport.to_torch(ours).as_subclass(torch.Tensor)
            torch.testing.assert_close(plain, theirs.as_subclass(torch.Tensor))
