"""The fragments that random modules are made of, as templates with gaps.

A gap names the kind of what fills it: `{mat}` is an expression of a matrix. `{mask:1}` twice is the same
mask twice. `{body}` on a line of its own is a block of statements.
"""

# The first templates of a kind are its leaves, which fill the gaps at the greatest depth.
LEAVES: dict[str, tuple[str, ...]] = {
    "mat": ("a", "b", "x", "y", "a", "b"),
    "vec": ("v", "v", "x[:, 0]", "a[:, 1]"),
    "scal": ("s", "s", "v[0]", "a[0, 1]"),
    "mask": ("m", "(~m)", "(v > 0)"),
    "emask": ("(a > 0)", "(b > a)", "(x == y)"),
    "idx": ("k", "k", "torch.arange(len(x))"),
    "num": ("0", "1", "-1.5", "0.5", "2", "n", "n"),
    "int": ("1", "2", "-1", "0", "5", "i", "i"),
    "small": ("0", "1", "2"),
    "cond": ("s > 0", "m.any()", "n > 1", "i > 1", "self.flag", "m[0]"),
    "w": ("a", "b", "a", "b", "x"),
}

DEEPER: dict[str, tuple[str, ...]] = {
    "mat": (
        *("self.lin({mat})", "self.norm({mat})", "self.bn({mat})", "self.emb({idx})"),
        *("self.conv({mat}.unsqueeze(1)).squeeze(1)", "({mat} * self.weight)"),
        *("({mat} + {mat})", "({mat} - {mat})", "({mat} * {mat})", "({mat} * {num})"),
        *("({mat} / {mat})", "({mat} + {vec}[:, None])", "({mat} * {scal})", "({mat} + {num})"),
        *("torch.where({emask}, {mat}, {mat})", "torch.where({mask}[:, None], {mat}, {num})"),
        *("{mat}.masked_fill({mask}[:, None], {num})", "{mat}.masked_fill({emask}, {num})"),
        *("{mat}.relu()", "{mat}.abs()", "{mat}.tanh()", "{mat}.sigmoid()", "{mat}.clamp(-1, 1)"),
        *("{mat}.softmax(-1)", "{mat}.sqrt()", "{mat}.log()", "{mat}.exp()", "({mat} ** 2)"),
        *("({mat} // 2)", "({mat} % 2)", "{mat}.round()", "{mat}.sign()", "{mat}.nan_to_num()"),
        *("{mat}[{idx}]", "{mat}.index_select(0, {idx})", "{mat}.index_add(0, {idx}, {mat})"),
        *("{mat}.gather(0, {idx}[:, None].expand(-1, 4))", "{mat}.cumsum(0)", "{mat}.flip(0)"),
        *("{mat}.scatter_add(0, {idx}[:, None].expand(-1, 4), {mat})", "{mat}.roll(1, 0)"),
        *("{mat}.sort(dim=1, stable=True).values", "{mat}.sort(dim=0, stable=True)[0]"),
        *("{mat}.reshape(-1).reshape(-1, 4)", "{mat}.t().contiguous().t()", "{mat}.flatten().view(-1, 4)"),
        *("torch.stack({mat}.unbind(0))", "torch.cat([{mat}[:2], {mat}[2:]])"),
        *("torch.cat({mat}.split(2, dim=1), dim=1)", "torch.cat([{mat}[1:], {mat}[:1]])"),
        *("torch.cat([{mat:1}[{mask:2}], {mat:1}[~{mask:2}]])", "{mat}.expand(2, -1, -1).sum(0)"),
        *("{mat}.detach()", "{mat}.to(torch.bfloat16).float()", "{mat}.clone()"),
        *("F.dropout({mat}, 0.0)", "Scaled.apply({mat})", "F.layer_norm({mat}, (4,))"),
        *("checkpoint(self.block, {mat}, use_reentrant=False)", "self.block({mat})"),
        *("torch.zeros_like({mat}).masked_scatter({emask}, {mat})", "{mat}.permute(1, 0).mT"),
        *("torch.maximum({mat}, {mat})", "torch.minimum({mat}, {mat})", "{mat}.triu()"),
        *("F.pad({mat}, (1, 0))[:, :4]", "torch.addcmul({mat}, {mat}, {mat})", "{mat}.double().float()"),
        *("{mat}.masked_fill({mat} != {mat}, 0.0)", "{mat}.contiguous()", "torch.full_like({mat}, {num})"),
        *("torch.where({cond}, {mat}, {mat})", "({mat} if {cond} else {mat})"),
        *("self.total.expand_as({mat})", "({mat} + self.total)"),
    ),
    "vec": (
        *("{mat}.sum(1)", "{mat}.mean(1)", "{mat}.amax(1)", "{mat}.max(1).values", "{mat}.norm(dim=1)"),
        *("{mat}[:, {small}]", "{mat}[..., -1]", "({vec} + {vec})", "({vec} * {num})", "({vec} / {vec})"),
        *("{vec}[{idx}]", "{vec}.cumsum(0)", "{vec}.sort(stable=True).values", "{vec}.flip(0)"),
        *("torch.where({mask}, {vec}, {vec})", "{vec}.masked_fill({mask}, {num})", "{mat}.logsumexp(1)"),
        *("{mat}.gather(1, {idx}[:, None])[:, 0]", "{idx}.float()", "{mask}.float()", "({vec} * {mask})"),
        *("torch.zeros_like({vec}).masked_scatter({mask}, {vec})", "{vec}.scatter_add(0, {idx}, {vec})"),
        *("torch.zeros(len(x)).index_put(({idx},), {vec}, accumulate=True)", "{mat}.prod(1)"),
        *("{mat}.std(1)", "{mat}.var(1, unbiased=False)", "{mat}.min(dim=1)[0]", "{vec}.sqrt()"),
        *("{vec}.topk(2).values.sum().expand(len(x))", "F.softmax({vec}, 0)", "{vec}.cummax(0).values"),
        *("(({mat} @ self.weight) + {num})", "{vec}.diff(prepend={vec}[:1])", "{vec}.half().float()"),
        *("torch.cat([{vec}[{mask:1}], {vec}[~{mask:1}]])", "{mat}.any(1).float()", "{mat}.argmax(1).float()"),
        *("torch.stack([r.sum() for r in {mat}])", "torch.bincount({idx}.clamp(0, 3), minlength=len(x))[:len(x)].float()"),
    ),
    "scal": (
        *("{mat}.sum()", "{mat}.mean()", "{mat}.max()", "{vec}.min()", "{vec}.std()", "{vec}.median()"),
        *("{mat}[{mask}].sum()", "{mat}[{mask}].mean()", "{vec}[{mask}].max()", "{vec}[{mask}].min()"),
        *("{vec}[{mask}].std()", "{vec}[{mask}].log().mean()", "{vec}[{mask}].sqrt().sum()"),
        *("({mat}[{mask:1}] - {mat}[{mask:1}]).pow(2).mean()", "{mat}[{emask}].mean()"),
        *("F.mse_loss({mat}[{mask:1}], {mat}[{mask:1}])", "{vec}.masked_select({mask}).sum()"),
        *("{mat}[{emask}].abs().max()", "{vec}[{mask}].prod()", "({vec}[{mask:1}] / {vec}[{mask:1}]).sum()"),
        *("({scal} + {scal})", "({scal} * {num})", "({scal} / {scal})", "({scal} - {num})", "{scal}.abs()"),
        *("{mat}[{mask}][0].sum()", "{vec}[{mask}][-1]", "{mask}.sum() * 1.0", "{mat}[0, {small}]"),
        *("{vec}.dot({vec})", "{vec}[{int}]", "{mat}[{int}].sum()", "{mat}[:{int}].sum()"),
        *("{mat}[{int}:{int}].sum()", "{vec}[{int}:].mean()", "{mat}[{int}:{int}].max()"),
        *("{vec}[{idx}[0]]", "{vec}[{mask}.nonzero()[:, 0]].sum()", "{vec}[torch.where({mask})[0]].mean()"),
        *("{vec}[{mask}].topk(1).values.sum()", "{vec}[{mask}].softmax(0).max()", "{vec}[{mask}].norm()"),
        *("{vec}[{mask}].cumsum(0).sum()", "{mat}[{mask}].amax(0).sum()", "{mat}[{mask}].mean(0).sum()"),
        *("torch.tensor({num}, dtype=torch.float32)", "{vec}[{vec}.argmax()]", "{vec}.narrow(0, 1, 2).sum()"),
        *("torch.as_tensor({scal})", "{vec}[{mask}].sort(stable=True).values.sum()", "{mat}[{mask}].shape[0] * s"),
        *("F.cross_entropy({mat}, {idx})", "F.binary_cross_entropy_with_logits({vec}, {mask}.float())"),
        *("{mat}[{mask}].numel() + {scal}", "{vec}.quantile(0.5)", "{vec}[{mask}].logsumexp(0)"),
        *("sum(r.max() for r in {mat})", "{vec}[::2].sum()", "{mat}[{mask}, {small}].sum()", "max({scal}, {scal})"),
    ),
    "mask": (
        *("({vec} > {num})", "({vec} >= {vec})", "({vec} == {vec})", "(~{mask})", "({mask} & {mask})"),
        *("({mask} | {mask})", "({mask} ^ {mask})", "{mat}.isnan().any(1)", "({idx} == {small})"),
        *("{mask}.flip(0)", "{mat}.isfinite().all(1)", "torch.ones_like({mask})", "{mask}.logical_not()"),
        *("({vec} != 0)", "({idx} < {idx})", "{emask}[:, {small}]", "{emask}.all(1)", "{mask}[{idx}]"),
        *("(torch.arange(len(x)) < {int})", "({vec} > {scal})", "{mask}.roll(1)", "{vec}.bool()"),
    ),
    "emask": (
        *("({mat} > {num})", "({mat} <= {mat})", "{mask}[:, None].expand(-1, 4)", "(~{emask})"),
        *("({emask} & {mask}[:, None])", "{mat}.isnan()", "({mat} > {vec}[:, None])", "{mat}.bool()"),
    ),
    "idx": (
        *("{vec}.argsort(stable=True)", "{mat}.argmax(1) % 3", "{idx}.flip(0)", "{idx}.clamp(0, 2)"),
        *("({idx} + 1) % 3", "{mask}.long()", "({idx} // 2)", "torch.where({mask}, {idx}, 0)"),
        *("{vec}.nan_to_num(0).clamp(-3, 2).long()", "({mask}.cumsum(0) - 1)", "{idx}.sort(stable=True).values"),
        *("({idx} - 1)", "{idx}.int()", "{mask}.cumsum(0) % 3", "{idx}.masked_fill({mask}, 1)"),
    ),
    "num": (
        *("{scal}.item()", "len({mat})", "int({mask}.sum())", "float({scal})", "({num} + {num})"),
        *("min({num}, {num})", "max({num}, 1)", "self.scale", "self.count", "({num} * 2)", "abs({num})"),
        *("{mask}.sum().item()", "({num} if {cond} else {num})", "{mat}.shape[0]", "{scal}", "bool({mask}.any())"),
        *("len(self.history)", "{mask}.float().mean().item()", "(-{num})", "{vec}.tolist()[0]"),
    ),
    "int": (
        *("int({mask}.sum())", "{mask}.sum().item()", "int({idx}[0])", "{idx}.max().item()", "({int} + 1)"),
        *("({int} - 1)", "{mask}.nonzero().shape[0]", "len(x) - 1", "min({int}, 2)", "int({mask}[0])"),
        *("{mask}.sum()", "{mat}[{mask}].shape[0]", "len({vec}[{mask}])", "self.count", "(-{int})"),
    ),
    "cond": (
        *("{scal} > {num}", "{mask}.any()", "{mask}.all()", "not {mask}.any()", "{num} > {num}"),
        *("({cond} and {cond})", "({cond} or {cond})", "not ({cond})", "{mat}.isnan().any()"),
        *("bool({mask}[0])", "{mask}.sum() > 2", "{scal}.item() > 0", "{int} == {int}", "-1 < {scal} < 1"),
        *("torch.equal({vec}, {vec})", "self.cache is None", "a is b", "self.training", "{int} < 2"),
        *("{idx}[0] == {idx}[1]", "{mat}[{mask}].numel() > 0", "torch.allclose({vec}, {vec})", "len(self.history) > 1"),
        *("({mask}.any() == True)", "{scal} == {scal}", "{num} != 0", "self.steps > 1", "{vec}[{int}] > 0"),
    ),
}

SIMPLE: tuple[str, ...] = (
    *("a = {mat}", "b = {mat}", "v = {vec}", "s = {scal}", "m = {mask}", "k = {idx}", "n = {num}", "i = {int}"),
    *("a = {mat}", "b = {mat}", "v = {vec}", "s = {scal}", "s = s + {scal}", "a = a + {mat}", "v = v * {vec}"),
    *("a, b = b, a", "a = b", "b = a.clone()", "a = x", "n += 1", "i += 1", "i = {small}"),
    # Writes through masks.
    *("{w}[{mask}] = {num}", "{w}[{mask:1}] = {mat}[{mask:1}]", "{w}[{mask}] += {num}", "v[{mask}] = {num}"),
    *("{w}[{mask:1}] *= {mat}[{mask:1}]", "{w}[{emask}] = {num}", "{w}[{emask:1}] += {mat}[{emask:1}]"),
    *("{w}.masked_fill_({emask}, {num})", "{w}[{mask}, {small}] = {num}", "{w}[{mask}, 1:] *= 2"),
    *("{w}[{mask}] = {mat}[{int}]", "v[{mask:1}] = {vec}[{mask:1}] * 2", "v[{mask}] = {scal}"),
    *("{w}[{mask}] = {mat}[:1]", "{w}[{mask:1}] = {mat}[{mask:1}].flip(0)", "{w}.masked_scatter_({emask}, {mat})"),
    # Writes through slices and views.
    *("{w}[:{int}] = {num}", "{w}[{int}:{int}] += 1", "{w}[{int}] = {mat}[0]", "{w}[:, {small}] = {vec}"),
    *("{w}.reshape(-1)[{small}] = {num}", "{w}[1:].zero_()", "{w}.t()[0] = {vec}", "{w}[{int}:] *= {num}"),
    *("u = {w}[1:]\nu += {num}", "u = {w}.view(-1, 2)\nu[0] = {num}", "u = {w}.flatten()\nu[1] = {num}"),
    *("{w}[0] = {w}[1]\n{w}[1] = {w}[2]", "{w}[0], {w}[1] = {w}[1].clone(), {w}[0].clone()"),
    *("{w}[1:] = {w}[:-1].clone()", "{w}[{int}, {small}] = {scal}", "u = {w}[0]\nu[{small}] = {num}\ns = s + u.sum()"),
    *("u = {w}[:, :2]\nu[{mask}] = {num}", "u = {w}.unbind(0)\nu[0].add_(1)", "u, _ = {w}.split(2, dim=1)\nu.mul_(2)"),
    *("u = {w}.unsqueeze(0)\nu[0, {small}] = {vec}[0]", "u = {w}.permute(1, 0)\nu[{small}].fill_({num})"),
    *("for j in range(len({w})):\n    {w}[j] = {w}[j - 1] + {num}", "for j in range(2):\n    {w}[j + 1] += {w}[j]"),
    # Other writes.
    *("{w} += {mat}", "{w}.clamp_(-1, 1)", "{w}.copy_({mat})", "v.index_add_(0, {idx}, {vec})", "{w}.mul_({num})"),
    *("{w}.scatter_(1, {idx}[:, None], {num})", "{w}[{idx}] = 0.0", "torch.add({w}, {mat}, out={w})"),
    *("v.scatter_(0, {idx}, 1.0)", "{w}.index_fill_(0, {idx}, 2.0)", "v.zero_()", "v += {vec}", "s += 1"),
    *("v.index_put_(({idx},), {vec}, accumulate=True)", "m[{int}] = True", "m &= {mask}"),
    *("k[{mask}] = 0", "k += 1", "v[{vec}.argsort(stable=True)] = {vec}", "v[{int}] = {scal}"),
    # Selected rows.
    *("r = {mat}[{mask:1}]\nr = r * 2\nb[{mask:1}] = r", "r = {mat}[{mask}]\ns = s + r.sum() / r.shape[0]"),
    *("r = {mask}.nonzero()[:, 0]\ns = s + {vec}[r].sum()", "r = {vec}[{mask}]\nv = v + r.sum() + r.numel()"),
    *("r = self.lin({mat}[{mask}])\ns = s + r.mean()", "r = {mat}[{mask}]\nr[:, 0] = {num}\ns = s + r.sum()"),
    *("r = torch.cat([{vec}[{mask}], {vec}[{mask}]])\ns = s + r.max()", "r = {mat}[{mask}]\ns = s + r[{int}].sum()"),
    *("r = {mat}[{mask:1}]\na = a.index_put((({mask:1}).nonzero()[:, 0],), r)", "r = {vec}[{mask}]\ns = s + r.argmax()"),
    *("r = {mat}[{mask}]\ns = s + torch.stack([t.sum() for t in (r, r * 2)]).max()", "r = {vec}[{mask}][:2]\ns = s + r.sum()"),
    # State.
    *("self.total += {mat}.sum(0).detach()", "self.total = {mat}.mean(0).detach()", "self.steps += 1"),
    *("self.total.mul_(0.5).add_({mat}[0].detach())", "self.count += 1", "self.flag = not self.flag"),
    *("self.total[{small}] = {scal}.detach()", "self.history.append(self.count)", "self.cache = {mat}.detach()"),
    *("self.seen['n'] = self.seen.get('n', 0) + 1", "self.last = {num}", "self.flag = bool({cond})"),
    *("if self.cache is None:\n    self.cache = {vec}.sum().detach()\ns = s + self.cache", "self.scale *= 2"),
    *("if not hasattr(self, 'late'):\n    self.register_buffer('late', {mat}[0].detach().clone())\na = a + self.late",),
    *("self.total[{mask}.nonzero().shape[0] % 4] += 1", "self.steps.add_({mask}.sum())", "self.seen[len(x)] = {small}"),
    *("with torch.no_grad():\n    self.total.copy_({mat}[{int}])", "self.history.append({int})", "n = self.last"),
    *("self.best = max(self.best, {scal}.item())", "self.total = torch.where({cond}, self.total, {mat}[0].detach())"),
    # Numbers and structures.
    *("n = {num} / 2", "n = {num} ** 2", "n = {int} // 2", "n = {int} % 3", "n = round({num}, 1)", "n = int({num})"),
    *("n = {num} / {num}", "rows = list({mat})\nrows[0] = rows[0] * 2\na = torch.stack(rows)", "i = int({scal} * 2)"),
    *("d = {'p': {mat}, 'q': {vec}}\nd['p'] = d['p'] + 1\na = d['p']", "a = sum([{mat}, {mat}])", "n = len(a[{mask}])"),
    *("rows = []\nfor r in {mat}:\n    rows.append(r * {num})\nb = torch.stack(rows)", "v, k = {vec}.sort(stable=True)"),
    *("v, k = {mat}.max(dim=1)", "rows = [r for r in {mat} if r.sum() > 0]\ns = s + len(rows)", "i = {idx}[{small}].item()"),
    *("s = s + sum({vec}.tolist())", "n = float({vec}[{int}])", "rows = {mat}.unbind(1)\nv = rows[{small}] + rows[-1]"),
)

BLOCKS: tuple[str, ...] = (
    *("if {cond}:\n    {body}", "if {cond}:\n    {body}\nelse:\n    {body}", "if {cond}:\n    {body}\nelse:\n    {body}"),
    *("if {cond}:\n    {body}\nelif {cond}:\n    {body}\nelse:\n    {body}", "if {cond}:\n    {return}"),
    *("if {cond}:\n    {body}\n    {return}", "if {cond}:\n    raise ValueError('no')", "assert {cond}, 'no'"),
    *("for j in range({small}):\n    {loop}", "for j in range({int}):\n    {loop}", "for r in {mat}:\n    s = s + r.sum()\n    {loop}"),
    *("c$ = 0\nwhile {cond} and c$ < 3:\n    c$ += 1\n    {loop}", "c$ = 0\nwhile s > 1 and c$ < 4:\n    s = s / 2\n    c$ += 1\n    {loop}"),
    *("with torch.no_grad():\n    {body}", "try:\n    {body}\nexcept (IndexError, RuntimeError, ZeroDivisionError):\n    {body}"),
    *("for j, r in enumerate({mat}):\n    if r.sum() > {num}:\n        v[j] = {num}\n        {loop}", "for t in (a, b):\n    s = s + t.sum()\n    {loop}"),
    *("c$ = 0\nwhile True:\n    c$ += 1\n    if c$ > 2 or {cond}:\n        break\n    {loop}",),
    *("r = {mat}[{mask}]\nif len(r) > 1:\n    s = s + r.mean()\n    {body}", "for j in range(len(x)):\n    if {mask}[j]:\n        {w}[j] = {num}\n        {loop}"),
)

# Only inside of a loop.
LEAVING: tuple[str, ...] = ("if {cond}:\n    break", "if {cond}:\n    continue", "v = v + j", "i = i + j")

RETURNS: tuple[str, ...] = (
    "return a, b, v, s, m, k, n",
    "return a, b, v, s, n",
    "return {'a': a, 'rest': [b, (v, s)], 'n': n, 'i': i}",
    "return a, (v, m), {'k': k, 's': s}, i",
    "return [a.sum(), b.mean(0), v, s], m, None",
    "return a + b * v[:, None] + s",
)

HEAD = '''\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 + 0 * x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.bn = nn.BatchNorm1d(4)
        self.emb = nn.Embedding(4, 4)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("steps", torch.tensor(0))
        self.count, self.scale, self.flag = 0, 0.5, False
        self.history, self.seen = [], {}
        self.cache, self.last, self.best = None, 1, 0.0

    def block(self, x):
        return self.lin(x).relu()

'''
FORWARD = '''\
    def forward(self, x, y, m, k):
'''
START = ("a = self.lin(x)", "b = y.clone()", "v = x.sum(1)", "s = y.mean()", "n = 1", "i = j = 1")
