"""The tensors that a call leaves in the user's module: eager PyTorch's values, layout, identity."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import tpuport
from tpuport.compat.emulated.programs import PortWarning, programs
from tpuport.foundation.errors import PortError


class Box:
    def __init__(self):
        self.tensor = torch.zeros(3)


class Keeps(nn.Module):
    """Keeps tensors in all places that a module has, bound anew or written in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bound", torch.zeros(3, 4))
        self.register_buffer("turned", torch.zeros(4, 3))
        self.register_buffer("square", torch.zeros(3, 3))
        self.register_buffer("mean", torch.zeros(2, 3, 4))
        self.register_buffer("sum", torch.zeros(2, 3, 4))
        self.last, self.table, self.items, self.box = None, {}, [], Box()
        self.hidden = torch.zeros(2, 3, 4)

    def forward(self, x):
        self.last = x.transpose(1, 2)
        self.table["own"], self.table["last"] = x.transpose(0, 1) * 2, self.last
        self.items = [x.permute(2, 1, 0) + 1]
        self.box.tensor = x[0, :, 0] * 3
        self.bound, self.turned, self.square = x[0] * 2, (x[0] * 2).t(), (x[0, :, :3] + 1).t()
        self.mean = self.mean * 0.5 + x
        self.sum += x
        self.hidden.mul_(0.5).add_(x)
        return x * 2

    def held(self):
        kept = {"last": self.last, "table": self.table.get("own"), "also": self.table.get("last")}
        kept |= {"items": self.items[0] if self.items else None, "box": self.box.tensor}
        return kept | {"hidden": self.hidden} | dict(self.named_buffers())


def described(tensor):
    drawn = torch.randn_like(tensor)
    return tensor.stride(), tensor.flatten().tolist(), drawn.flatten().tolist()


def seen(device):
    """What a script sees of three calls: the new tensors, and what became of the old ones."""
    torch.manual_seed(0)
    net = Keeps().to(device)
    net.hidden, net.box.tensor = net.hidden.to(device), net.box.tensor.to(device)
    found = []
    for x in torch.arange(3 * 24.0).reshape(3, 2, 3, 4).to(device):
        old, table, box = net.held(), net.table, net.box
        net(x)
        new = net.held()
        found.append({name: described(tensor) for name, tensor in new.items()})
        found.append({name: t if t is None else t.tolist() for name, t in old.items()})
        found.append([name for name in new if new[name] is old[name]])
        found.append([net.table is table, net.box is box, net.table["last"] is net.last])
    # What is None at first is one retrace.
    assert [len(program.report.retraces) for program in programs()] == [1] * (device != "cpu")
    return found


def test_the_tensors_of_a_module_after_a_call_are_those_of_eager():
    expected = seen("cpu")
    with tpuport.porting():
        got = seen("cuda")
    assert got == expected


@pytest.mark.parametrize("make", [lambda x: x * 2, lambda x: (x * 2).t()], ids=["same", "turned"])
def test_a_layout_that_changes_from_call_to_call_is_seen_by_the_next_one(make):
    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.zeros(3, 3))

        def forward(self, x):
            step = self.kept.stride(0)
            self.kept = make(x)
            return x * step

    net = Turns()
    ported = tpuport.convert(Turns())
    for i in range(3):
        x = torch.arange(9.0).reshape(3, 3) + i
        assert torch.equal(ported(x).cpu(), net(x))
        assert (ported.buffers["kept"] == net.kept.numpy()).all()


class Moves(nn.Module):
    """Moves a plain tensor within a list that changes its structure, and writes to it."""

    def __init__(self):
        super().__init__()
        self.items, self.view = [torch.full((3, 3), 0.0), torch.full((3, 3), 1.0)], None

    def forward(self, x):
        self.items.append((x * 2).t())
        self.items.pop(0)
        self.view = self.items[0].t()
        self.items[0][0] = x[1]
        return x + self.items[0]


def moved(device):
    net = Moves()
    net.items = [tensor.to(device) for tensor in net.items]
    kept, found = net.items[1], []
    for x in torch.arange(18.0).reshape(2, 3, 3).to(device):
        out = net(x)
        net.items[0][2] = 9.0
        found.append([t.tolist() for t in (out, *net.items, net.view, kept)])
    return found


def test_a_tensor_that_a_call_moves_and_writes_to_keeps_the_write():
    expected = moved("cpu")
    with tpuport.porting():
        assert moved("cuda") == expected


class Looks(nn.Module):
    """Returns views of tensors that it keeps in a dict and an attribute."""

    def __init__(self):
        super().__init__()
        self.table, self.plain = {"u": torch.full((2, 3), 1.0)}, torch.full((2, 3), 2.0)

    def forward(self, x):
        kept = self.table["u"]
        return x * 2 + kept, kept.detach(), kept[0], kept.t(), self.plain[:, 1:]


def written(device):
    net = Looks()
    net.table["u"], net.plain = net.table["u"].to(device), net.plain.to(device)
    found = []
    for _ in range(3):
        results = net(torch.ones(2, 3).to(device))
        for result in results[1:]:
            result.mul_(2)
        found.append([t.tolist() for t in (*results, net.table["u"], net.plain)])
    return found


def test_a_write_to_a_result_that_is_a_view_of_a_plain_attribute_reaches_it():
    expected = written("cpu")
    with tpuport.porting():
        assert written("cuda") == expected


ORDER = OrderedDict(a=1.0, b=2.0)


class Ordered(nn.Module):
    """Keeps dicts with an order of their own, and changes it."""

    def __init__(self):
        super().__init__()
        self.turns, self.kept = OrderedDict(x=0.5, y=2.0), OrderedDict()

    def forward(self, x):
        self.turns.move_to_end(next(iter(self.turns)))
        self.kept["k"], self.kept["j"] = x * 2, x * 3
        self.kept.move_to_end("k")
        return x * next(iter(self.turns.values())) * next(iter(ORDER.values()))


def ordered(device):
    net, found = Ordered().to(device), []
    for number in range(4):
        ORDER.move_to_end("ab"[number // 2])
        out = net(torch.ones(1, device=device))
        kept = [(key, value.tolist()) for key, value in net.kept.items()]
        found.append((out.item(), list(net.turns.items()), kept))
    return found


def test_the_order_of_an_ordered_dict_is_that_of_eager():
    expected = ordered("cpu")
    with tpuport.porting():
        assert ordered("cuda") == expected


class Decides(nn.Module):
    """Sets Python values of its own where a branch on traced values says so."""

    def __init__(self):
        super().__init__()
        self.layer, self.warm, self.count, self.scale = nn.Linear(3, 1), False, 0, 1.0

    def forward(self, x):
        out = self.layer(x).sum() * self.scale + self.count
        out = -out if self.warm else out
        if x.sum() > 0:
            self.warm, self.count, self.scale = True, self.count + 3, 0.5
        return out


@pytest.mark.parametrize("values", [(-1.0, 1.0, -1.0), (1.0, -1.0, 1.0)])
def test_a_branch_on_data_leaves_the_values_of_the_way_that_was_taken(values):
    def found(device):
        torch.manual_seed(0)
        net, kept = Decides().to(device), []
        for value in values:
            out = net(torch.full((2, 3), value, device=device))
            kept += [net.warm, net.count, net.scale, float(out.detach())]
        return kept

    with tpuport.porting():
        ported = found("cuda")
    assert ported == pytest.approx(found("cpu"))


class Adversarial(nn.Module):
    """Freezes and trains its critic inside the call, as losses of GANs do, and its scale never."""

    def __init__(self):
        super().__init__()
        self.critic, self.scale = nn.Linear(3, 1), nn.Parameter(torch.ones(1))
        self.tied = nn.ParameterList([self.scale, self.critic.weight])

    def forward(self, x, mode):
        if mode == "freeze":
            self.scale.requires_grad_(False)
        for parameter in self.critic.parameters():
            parameter.requires_grad = mode == "critic"
        if mode == "generator":
            return -self.critic(x).mean() * self.scale
        return torch.relu(1 + self.critic(x.detach())).mean() * self.scale


@pytest.mark.parametrize("freezes", [False, True])
def test_requires_grad_is_what_a_call_leaves(freezes):
    def found(device):
        torch.manual_seed(0)
        loss, source, kept = Adversarial().to(device), nn.Linear(2, 3).to(device), []
        modes = ["generator", "critic", "generator", "critic"]
        for mode in [*modes[:2], "freeze", *modes] if freezes else modes:
            out = loss(source(torch.ones(4, 2, device=device)), mode)
            kept.append([out.requires_grad, *(p.requires_grad for p in loss.parameters())])
            if out.requires_grad:
                out.sum().backward()
            grads = [p.grad for p in (*loss.parameters(), *source.parameters())]
            kept.append([torch.tensor([]) if g is None else g.cpu().clone() for g in grads])
        return kept

    expected = found("cpu")
    with tpuport.porting():
        torch.testing.assert_close(found("cuda"), expected)


def test_requires_grad_that_data_decides_is_refused():
    class Stops(nn.Linear):
        def forward(self, input):
            if input.sum() > 0:
                self.weight.requires_grad_(False)
            return super().forward(input)

    with tpuport.porting(), pytest.raises(tpuport.PortError, match="requires_grad of a param"):
        Stops(3, 1).to("cuda")(torch.ones(2, 3, device="cuda"))


class KeepsParts(nn.Module):
    """Keeps the last rows of what it returns, as a recurrent model keeps its hidden state."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.last, self.row = None, None

    def forward(self, x):
        out, other = x * self.weight, x + self.weight
        self.last, self.row = out[:, -1], other[2]
        return out, other


def kept_parts(device):
    net = KeepsParts().to(device)
    found = []
    with torch.no_grad():
        for number in range(3):
            results = net(torch.arange(12.0).view(4, 3).to(device) + number)
            for result in results:
                result.mul_(2)
            net.row[0] = -1.0
            found.append([t.tolist() for t in (*results, net.last, net.row)])
    return found


def test_state_that_is_a_part_of_a_result_sees_writes_to_it():
    expected = kept_parts("cpu")
    with tpuport.porting():
        assert kept_parts("cuda") == expected


class Averages(nn.Module):
    """A running average that begins another way at its first call."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("average", torch.ones(()))

    def forward(self, x):
        if self.calls == 0:
            self.average.mul_(3)
        else:
            self.average.mul_(0.5).add_(x.max())
        self.calls += 1
        return x * self.average


class Exchanges(nn.Module):
    """Makes a new submodule at each call, and writes to its argument."""

    def __init__(self):
        super().__init__()
        self.averages = Averages()
        self.other = None

    def forward(self, x):
        x.mul_(2)
        self.other = nn.Linear(3, 3) if self.other is None else nn.Identity()
        for _ in range(3):
            x = self.averages(x)
        return x


class KeepsAll(nn.Module):
    """Changes a string at each call, and writes to its argument."""

    def __init__(self):
        super().__init__()
        self.averages = Averages()
        self.name = ""

    def forward(self, x):
        x.mul_(2)
        self.name += "x"
        return self.averages(x) + len(self.name)


@pytest.mark.parametrize("make", [Exchanges, KeepsAll])
def test_a_program_that_is_given_up_after_it_ran_leaves_nothing(make):
    def ran(device):
        torch.manual_seed(0)
        net, found = make().to(device), []
        for seed in range(7):
            x = torch.linspace(-1, seed, 6, device=device).reshape(2, 3)
            out = net(x)
            found.append([t.tolist() for t in (out, x, net.averages.average)])
            found.append(net.averages.calls)
        return found

    expected = ran("cpu")
    with tpuport.porting(), pytest.warns(PortWarning, match="not one program"):
        got = ran("cuda")
    for have, want in zip(got, expected, strict=True):
        torch.testing.assert_close(have, want)


def test_an_attribute_that_the_call_wrote_shares_its_memory_with_a_view_that_it_left():
    class Detaches(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.kept = nn.Parameter(torch.ones(2)), None
            self.hidden = torch.zeros(2)

        def forward(self, x):
            self.hidden[0] = x[0]
            if self.kept is None:
                self.kept = self.hidden.detach()
            return x * self.weight

    with tpuport.porting():
        net = Detaches().to("cuda")
        net.hidden = net.hidden.cuda()
        net(torch.ones(2, device="cuda"))
        assert net.kept.data_ptr() == net.hidden.data_ptr()
        # Eager PyTorch changes both; the port had one of them, without an error.
        with pytest.raises(PortError, match="views of the same memory"):
            net(torch.full((2,), 2.0, device="cuda"))


def test_a_write_to_a_tensor_that_the_call_moved_in_its_dict_is_seen_at_its_new_place():
    class Swaps(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.table = {"a": torch.zeros(2), "b": torch.ones(2)}

        def forward(self, x):
            self.table.pop("c", None)
            self.table["c"] = (x * self.weight).detach()
            self.table["a"], self.table["b"] = self.table["b"], self.table["a"]
            self.table["a"][0] = x[1] * 3
            return x * 2

    def seen(device):
        net, found = Swaps().to(device), []
        net.table = {key: value.to(device) for key, value in net.table.items()}
        first = net.table["b"]
        for value in (2.0, 3.0, 4.0):
            net(torch.full((2,), value, device=device))
            found += [[tensor.tolist() for tensor in net.table.values()], first.tolist()]
            found.append(first is net.table["b" if value == 3 else "a"])
        return found

    expected = seen("cpu")
    with tpuport.porting():
        assert seen("cuda") == expected


def test_a_result_that_is_a_plain_attribute_which_the_call_wrote_is_that_tensor():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.counts = nn.Parameter(torch.ones(2)), torch.zeros(2)

        def forward(self, x):
            self.counts.add_(x)
            return self.counts, self.counts[1:]

    def seen(device):
        net, found = Counts().to(device), []
        net.counts = net.counts.to(device)
        for value in (1.0, 2.0, 3.0):
            whole, part = net(torch.full((2,), value, device=device))
            whole[0], part[0] = 5.0, 7.0
            found += [whole.tolist(), part.tolist(), net.counts.tolist()]
        return found

    expected = seen("cpu")
    with tpuport.porting():
        assert seen("cuda") == expected


class ReturnsParts(nn.Module):
    """Returns results that are views of one another, with a graph, without one, and constants."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        y, mask = torch.tanh(self.linear(x)) * 2, torch.ones(3, device=x.device)
        return y[:, 0], y, y.detach()[1:], y.t(), mask, mask.view(1, 3)


def test_results_that_are_views_of_one_another_see_writes_and_gradients():
    """In place through a view, to its base, without a graph; hooks and gradients of either."""
    seen = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        with tpuport.porting():
            module, found = ReturnsParts().to(device), []
            x = torch.linspace(-1, 1, 6).reshape(2, 3).to(device)
            out = module(x)
            out[0].retain_grad()
            out[1].register_hook(lambda gradient, found=found: found.append(gradient))
            (out[0].square().sum() + out[1].sum() + out[3].square().sum()).backward()
            found += [out[0].grad, module.linear.weight.grad.clone()]
            out = module(x)
            out[0].mul_(3)
            out[1].sum().backward()
            found += [module.linear.weight.grad, *out]
            out = module(x)
            out[2].zero_()
            out[5].add_(1)
            found += out
            with torch.no_grad():
                out = module(x)
                out[3].div_(2)
            found += out
        seen[device] = [t.detach().cpu() for t in found]
        seen[device].append(torch.tensor([t.requires_grad for t in out]))
    for want, have in zip(seen["cpu"], seen["cuda"], strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)


class LeavesConstants(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.kept, self.host = nn.Linear(3, 3), None, None

    def forward(self, x):
        made = torch.zeros(3, device=x.device) + 1
        self.kept, self.host = made.detach(), torch.ones(2)
        return self.linear(x).sum(), made


def test_a_constant_that_the_first_call_leaves_shares_memory_with_a_result():
    with tpuport.porting():
        module = LeavesConstants().to("cuda")
        _, made = module(torch.ones(2, 3).to("cuda"))
        made.mul_(3)
        assert module.kept.tolist() == [3.0] * 3
        module.kept.add_(1)
        assert made.tolist() == [4.0] * 3
        assert (module.kept.device.type, module.host.device.type) == ("cuda", "cpu")
        assert module(torch.ones(2, 3).to("cuda"))[1].tolist() == [1.0] * 3


class KeepsOldest(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("kept", torch.zeros(2, 3))

    def forward(self, x):
        y = self.linear(x).tanh()
        if x.sum() > 0:
            self.kept = y
        return y


@pytest.mark.parametrize("last", [-1.0, 1.0])
def test_a_graph_that_data_decides_on_under_no_grad_is_eagers(last):
    """The branch leaves the tensor of the first call, with its graph, or one without."""
    gradients = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        with tpuport.porting():
            module = KeepsOldest().to(device)
            module(torch.ones(2, 3).to(device))
            if device == "cuda":
                with pytest.warns(PortWarning, match="with its graph, or another one without"):
                    with torch.no_grad():
                        module(torch.full((2, 3), last).to(device))
            else:
                with torch.no_grad():
                    module(torch.full((2, 3), last))
            (module.kept.sum() + module.linear.bias.sum()).backward()
            gradients.append((module.kept.requires_grad, module.linear.weight.grad))
    (want, of), (have, other) = gradients
    assert have == want == (last < 0)
    assert (of is None) == (other is None)
    assert of is None or torch.allclose(other.cpu(), of, rtol=1e-5, atol=1e-6)
