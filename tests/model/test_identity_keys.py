"""What code looks up by identity: tensors, modules and objects as keys, ids, shared objects."""

import weakref

import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import PortError

TABLE, WEAK = {}, weakref.WeakKeyDictionary()


class Kind:
    def __init__(self):
        self.count = 1
        self.sum = torch.zeros(())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(4, 3), nn.Linear(4, 3), Kind()
        self.setup()

    def setup(self):
        pass


class Keyed(Net):
    """Looks up by all that has an identity, with a default where nothing is found."""

    def setup(self):
        self.scales = {self.a: 2.0, self.a.weight: 3.0, self.kind: 4.0, (self.b, 1): 5.0}
        self.by_id = {id(self.b): 6.0, id(self.b.weight): 7.0}
        self.frozen, self.order = {id(self.a)}, [id(self.a.weight)]
        self.weak = weakref.WeakKeyDictionary({self.b: 8.0})

    def forward(self, x):
        a = self.a(x) * self.scales.get(self.a, 1.0) * self.scales.get(self.a.weight, 1.0)
        b = self.b(x) * self.by_id.get(id(self.b), 1.0) * self.by_id.get(id(self.b.weight), 1.0)
        a = a * self.scales.get(self.kind, 1.0) * self.scales.get((self.b, 1), 1.0)
        b = b * self.weak.get(self.b, 1.0) + 10 * (id(self.a) in self.frozen)
        return a + b + 20 * (id(self.a.weight) in self.order)


class Counts(Net):
    """Keeps numbers and values of the call under its modules and parameters."""

    def setup(self):
        self.counts = {}

    def forward(self, x):
        h = self.a(x)
        for key in (self.a, self.b.weight):
            self.counts[key] = self.counts.get(key, 0) + h.mean().detach()
        return h * self.counts[self.a] + len(self.counts) + self.counts[self.b.weight]


def called(net, device, *calls):
    torch.manual_seed(0)
    net = net().to(device)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        outs = [net(torch.randn(2, 4).to(device), *more) for more in calls]
    sum(out.sum() for out in outs).backward()
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    return [*outs, *grads], net


def converted(net, *calls):
    torch.manual_seed(0)
    ported = tpuport.convert(net())
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return [tpuport.to_torch(ported(torch.randn(2, 4), *more)) for more in calls]


@pytest.mark.parametrize("net", [Keyed, Counts])
def test_copies_are_found_under_what_the_originals_are_found_under(net):
    expected, _ = called(net, "cpu", (), ())
    for ours, theirs in zip(converted(net, (), ()), expected, strict=False):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-5)
    with tpuport.porting():
        found, left = called(net, "cuda", (), ())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-5, atol=1e-5)
    if net is Counts:
        assert list(left.counts) == [left.a, left.b.weight]


class Outside(Net):
    """Its parts are keys of tables outside, which a trace does not have copies of."""

    def forward(self, x):
        return self.a(x) * TABLE.get(self.key(), 1.0) * WEAK.get(self.a, 1.0)


class OutsideModule(Outside):
    def setup(self):
        TABLE[self.a] = 2.0

    def key(self):
        return self.a


class OutsideTensor(Outside):
    def setup(self):
        TABLE[self.a.weight, "x"] = 2.0

    def key(self):
        return self.a.weight, "x"


class OutsideId(Outside):
    def setup(self):
        TABLE[id(self.a)] = 2.0

    def key(self):
        return id(self.a)


class OutsideWeak(Outside):
    def setup(self):
        WEAK[self.a] = 2.0

    def key(self):
        return ""


@pytest.mark.parametrize("net", [OutsideModule, OutsideTensor, OutsideId, OutsideWeak])
def test_tables_outside_are_refused_and_right_by_parts(net):
    try:
        expected, _ = called(net, "cpu", ())
        with pytest.raises(PortError, match=r"TPU406 .*(TABLE|WEAK) is a table outside"):
            converted(net, ())
        with tpuport.porting(), pytest.warns(match="is a table outside"):
            found, _ = called(net, "cuda", ())
        torch.testing.assert_close(found[0].detach().cpu(), expected[0].detach())
    finally:
        TABLE.clear(), WEAK.clear()


class KeepsIds(Net):
    def setup(self):
        self.seen = {}

    def forward(self, x):
        self.seen[id(self.a)] = self.seen.get(id(self.a), 0) + 1
        return self.a(x) * self.seen[id(self.a)]


def test_ids_that_a_call_keeps_are_refused():
    with pytest.raises(PortError, match="TPU406 the call keeps the id of a tensor or module"):
        converted(KeepsIds, ())


class Looks(Net):
    """Raises in a trace only, whose tensors are of another class for what asks C."""

    def forward(self, x):
        if "Traced" in object.__repr__(x):
            msg = "no tensor"
            raise ValueError(msg)
        return self.a(x)


def test_what_only_a_trace_raises_is_refused_and_right_by_parts():
    expected, _ = called(Looks, "cpu", ())
    with pytest.raises(PortError, match="TPU105 the traced code raises ValueError: no tensor"):
        converted(Looks, ())
    with tpuport.porting(), pytest.warns(match="no tensor; eager PyTorch does not"):
        found, _ = called(Looks, "cuda", ())
    torch.testing.assert_close(found[0].detach().cpu(), expected[0].detach())


class Shared(Net):
    """Holds one object in three attributes, and changes it by each of them."""

    def setup(self):
        self.kinds, self.table, self.lr = [self.kind], {"kind": self.kind}, 0.5
        self.opt = torch.optim.SGD(self.a.parameters(), lr=0.5)

    def forward(self, x, how):
        if how == "append":
            self.kinds.append(len(self.kinds))
        if how == "attribute":
            self.kind.count += 1
        if how == "element":
            self.kinds[0].count += 1
        if how == "tensor":
            self.kind.sum = self.kind.sum + x.mean()
        if how == "optimizer":
            self.opt.param_groups[0]["lr"] *= 0.5
        sizes = self.kind.count + 10 * self.kinds[0].count + 100 * self.table["kind"].count
        sums = self.kinds[0].sum + 2 * self.table["kind"].sum + 3 * self.kind.sum
        return self.a(x) * sizes + sums + len(self.kinds) + self.opt.param_groups[0]["lr"]


def test_an_object_in_several_attributes_stays_one():
    calls = [(how,) for how in ("append", "attribute", "tensor", "element", "optimizer", "tensor")]
    expected, _ = called(Shared, "cpu", *calls)
    for ours, theirs in zip(converted(Shared, *calls), expected, strict=False):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-4)
    made = []

    def build():
        net = Shared()
        made.append((net, net.kind, net.opt, net.kinds))
        return net

    with tpuport.porting():
        found, _ = called(build, "cuda", *calls)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-5, atol=1e-4)
    net, *held = made[0]
    assert [net.kind, net.opt, net.kinds] == held
    assert net.kinds[0] is net.kind is net.table["kind"]
    assert net.opt.param_groups[0]["params"][0] is net.a.weight
