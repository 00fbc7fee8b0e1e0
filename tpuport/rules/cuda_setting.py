"""TPU519: a setting of host code that stands for CUDA."""

import ast
import re
from dataclasses import dataclass

from tpuport.rules._devices import ASKS_DEVICE, AVAILABLE, is_guarded, outermost_choice
from tpuport.rules._origins import last_name
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import Module

_DEVICE = re.compile(r"(^|[-_])device$", re.IGNORECASE)
_CUDA = re.compile(r"^cuda(:\d+)?$")
_FLOAT16 = "a TPU has to widen float16: bfloat16 is its half precision"
_ASKS_PRECISION = re.compile(rf"{ASKS_DEVICE.pattern}|fp16|half|bf16|dtype|precision", re.I)
_QUANTISED = "bitsandbytes has kernels for CUDA alone"


@dataclass(frozen=True)
class _Setting:
    """Settings with one meaning: the values, the names of what takes them, and the consequence.

    A test that has `asks` in its words knows that the value may not do.
    """

    values: re.Pattern[str]
    names: re.Pattern[str]
    consequence: str
    asks: re.Pattern[str] = ASKS_DEVICE


_OPTION = _Setting(_CUDA, _DEVICE, "a device that a TPU machine does not have")
_KINDS = (
    _OPTION,
    _Setting(
        re.compile(r"^(flash_attention_[23]|sage_?attn\w*|sage_attention|xformers)$"),
        re.compile(r"(attn|attention)_(impl|mode|backend|type)", re.IGNORECASE),
        "the package of these kernels is for CUDA alone",
        re.compile(rf"{ASKS_DEVICE.pattern}|_ver\b|version|installed|has_", re.IGNORECASE),
    ),
    _Setting(
        re.compile(r"^nccl$"),
        re.compile(r"backend$|^init_process_group$", re.IGNORECASE),
        "NCCL connects GPUs of NVIDIA",
    ),
    _Setting(
        re.compile(r"^(fp16|float16|(fp)?16-mixed)$"),
        re.compile(r"(precision|dtype)$", re.IGNORECASE),
        _FLOAT16,
        _ASKS_PRECISION,
    ),
    _Setting(
        re.compile(r"^(gpu|cuda)$"),
        re.compile(r"(^|[-_])accelerator$", re.IGNORECASE),
        "a TPU machine has no GPU",
    ),
    _Setting(
        re.compile(r"^CUDA_VISIBLE_DEVICES$"),
        re.compile(r"^os\.(environ|putenv)"),
        "it chooses no chip of a TPU, so that each process takes all of them",
    ),
)
# Switches that are for CUDA when they are on.
_SWITCHES = (
    _Setting(re.compile("^True$"), re.compile(r"(^|[-_])fp16$"), _FLOAT16, _ASKS_PRECISION),
    _Setting(re.compile("^True$"), re.compile(r"load[-_]in[-_][48]bit$"), _QUANTISED),
)
# Calls that declare an option of a command, with the value that it has if it is left out.
_OPTIONS = re.compile(r"(add_argument|\boption|\bOption|\bArgument|DEFINE_\w+)$")
# Functions that start a package for CUDA.
_ENGINES = frozenset(
    {
        "deepspeed.initialize",
        "deepspeed.init_distributed",
        "deepspeed.init_inference",
        "deepspeed.zero.Init",
        "apex.amp.initialize",
    }
)
_ENGINE_NAMES = {name.rpartition(".")[2] for name in _ENGINES}
_XFORMERS = "enable_xformers_memory_efficient_attention"


class CudaSetting(Rule):
    """A setting of host code that stands for CUDA.

    ## What it does
    Finds the values of scripts, configurations and argument parsers that a port has to change:
    a `--device` whose default is `"cuda"`, the choice between `"cuda"` and `"cpu"` by
    `torch.cuda.is_available()`, `attn_implementation="flash_attention_2"`, a `backend` of `"nccl"`,
    `mixed_precision="fp16"`, `accelerator="gpu"`, `load_in_8bit=True`, `CUDA_VISIBLE_DEVICES`,
    calls that start DeepSpeed, and arithmetic with `torch.cuda.device_count()`.

    ## Why is this bad?
    On a TPU machine the choice between CUDA and the CPU is the CPU, without a word; there are no
    CUDA devices to divide a rank by; FlashAttention, NCCL, DeepSpeed and bitsandbytes are not
    there. `tpuport run` answers devices, NCCL and FlashAttention: the script stays as it is.

    ## Fix safety
    There is no automatic fix, since the setting is the user's: give it another value by the
    script's own option, or use `tpuport run`.

    ## References
    https://pytorch.org/docs/stable/notes/cuda.html#device-agnostic-code
    """

    CODE = "TPU519"
    MESSAGE = "`{code}`: {consequence}"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.DEVICE

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                local_rank = 3 % torch.cuda.device_count()
                return x + local_rank
            """,
            jit_error="ZeroDivisionError",
            left="no automatic fix",
        ),
        Example(
            before="""
            import torch
            import torch.distributed as dist


            def start(backend: str = "nccl"):
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


            start()


            def forward(x: torch.Tensor):
                return x + dist.get_world_size()
            """,
            jit_error="RuntimeError",
            left="no automatic fix",
        ),
        Example(
            before="""
            import deepspeed
            import torch


            def forward(x: torch.Tensor):
                model, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config={})
                return model(x)
            """,
            jit_error="ModuleNotFoundError",
            left="no automatic fix",
        ),
    )
    CLEAN = (
        """
        import torch


        class Config:
            attn_implementation = "sdpa"
            backend = "inductor"
            device = "cpu"


        def main(parser):
            parser.add_argument("--device", default=None, help="cuda or cpu")
            parser.add_argument("--backend", choices=["nccl", "gloo"], default="gloo")
            if torch.cuda.device_count() > 1 or Config.attn_implementation == "flash_attention_2":
                return "nccl"
            return f"{torch.cuda.device_count()} devices"
        """,
        """
        import os

        import torch


        class Model:
            def initialize(self, fp16: bool = False, precision: str = "bf16", variant="fp16"):
                self.device = "cuda" if self.wants_cuda else "cpu"
                return {"accelerator": "auto", "cuda": "fp16"}


        def start(args, device):
            if os.environ["CUDA_VISIBLE_DEVICES"] and not torch.cuda.is_available():
                device = "cpu"
            if torch.cuda.is_available():
                torch.cuda.manual_seed(0)
            os.environ["TPU_VISIBLE_CHIPS"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
            if args.precision == "fp16":
                return Model().initialize(precision="fp16")
            return Model().initialize(), args.accelerator == "gpu", args.load_in_8bit is True
        """,
    )

    def visit_Constant(self, node: ast.Constant, context: Context) -> None:
        kinds = _kinds(node.value)
        if not kinds:
            return
        name = _setting(node, context)
        found = next((kind for kind in kinds if kind.names.search(name)), None)
        if found is None or (found is _OPTION and not _is_option(node, context)):
            return
        if not is_guarded(node, context.module, found.asks, strictly=True):
            self._say(node, found.consequence, context)

    def visit_IfExp(self, node: ast.IfExp, context: Context) -> None:
        body, other = ast.unparse(node.body), ast.unparse(node.orelse)
        if "cuda" not in body + other:
            return
        there = _asks_for_cuda(node.test, context)
        cuda, cpu = (body, other) if there else (other, body)
        chosen = there is not None and "cuda" in cuda and "cpu" in cpu and "cuda" not in cpu
        if chosen and not context.in_step(node):
            self._say(node, "on a TPU machine this is the CPU, without a word", context)

    def visit_If(self, node: ast.If, context: Context) -> None:
        match node.body:
            case [ast.Assign(targets=[target], value=value)]:
                name = last_name(target) or ""
            case [ast.Return(value=ast.expr() as value)]:
                name = "device" if _names_device(value, context) else ""
            case _:
                return
        if not _DEVICE.search(name) or "cuda" not in ast.unparse(value):
            return
        if _asks_for_cuda(node.test, context) and not context.in_step(node):
            self._say(value, "on a TPU machine it is never chosen, without a word", context)

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        called = last_name(node.func)
        if called == "device_count":
            self._look_at_count(node, context)
        elif called in _ENGINE_NAMES and context.name(node.func) in _ENGINES:
            package = (context.name(node.func) or "").partition(".")[0]
            if package not in context.own and not is_guarded(node, context.module, ASKS_DEVICE):
                self._say(node.func, f"{package} is for CUDA alone", context)
        elif called == _XFORMERS and not is_guarded(node, context.module, ASKS_DEVICE):
            self._say(node.func, "xformers has kernels for CUDA alone", context)

    def _look_at_count(self, node: ast.Call, context: Context) -> None:
        parent = context.module.parents[node]
        if not isinstance(
            parent, ast.BinOp | ast.Assign | ast.AnnAssign | ast.keyword | ast.Return
        ):
            return
        if context.name(node.func) == "torch.cuda.device_count":
            if not is_guarded(node, context.module, ASKS_DEVICE, strictly=True):
                self._say(node, "0 on a TPU machine", context)

    def _say(self, node: ast.expr, consequence: str, context: Context) -> None:
        parent = context.module.parents[node]
        shown = parent if isinstance(parent, ast.keyword) else node
        context.report(self, shown, code=context.module.source(shown), consequence=consequence)


def _kinds(value: object) -> tuple[_Setting, ...]:
    """Return the kinds of setting that a constant may be; asked of every constant of a file."""
    if value is True:
        return _SWITCHES
    if not isinstance(value, str) or len(value) > 20:
        return ()
    return tuple(kind for kind in _KINDS if kind.values.match(value))


def _is_cuda(node: ast.Constant) -> bool:
    return isinstance(node.value, str) and _CUDA.match(node.value) is not None


def _names_device(value: ast.expr, context: Context) -> bool:
    match value:
        case ast.Constant():
            return _is_cuda(value)
        case ast.Call(func=function):
            return context.name(function) == "torch.device"
        case _:
            return False


def _asks_for_cuda(test: ast.expr, context: Context) -> bool | None:
    """Return the outcome of a test with CUDA, if it asks PyTorch whether CUDA is there, or None."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            there = _asks_for_cuda(operand, context)
            return None if there is None else not there
        case ast.BoolOp(values=values):
            return next((a for v in values if (a := _asks_for_cuda(v, context)) is not None), None)
        case ast.Call(func=function):
            return True if context.name(function) == AVAILABLE[:-2] else None
        case ast.Name(id=name):
            return True if _stands_for_cuda(name, context.module) else None
        case _:
            return None


def _stands_for_cuda(name: str, module: Module) -> bool:
    """Return whether a file assigns to a name whether CUDA is there, and nothing else."""
    values = [
        node.value
        for node in module.by_class.get(ast.Assign, ())
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    ]
    return bool(values) and all("cuda.is_available()" in ast.unparse(value) for value in values)


def _setting(node: ast.expr, context: Context) -> str:
    """Return the name of what a constant sets: a variable, an argument, a key or an option."""
    node, parent = outermost_choice(node, context.module)
    match parent:
        case ast.keyword(arg="default") if _is_option(node, context):
            return _option(context.module.parents[parent])
        case ast.keyword(arg=str(name)):
            return name
        case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
            return target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
        case ast.Dict(keys=keys, values=values) if node in values:
            key = keys[values.index(node)]
            return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""
        case ast.arguments():
            return _argument(parent, node)
        case ast.Call() if _is_option(node, context):
            return _option(parent)
        case ast.Call(func=function, args=[first, *_]) if first is node:
            return _taken_by(function)
        case ast.Subscript(ctx=ast.Store(), value=value):
            return ast.unparse(value)
        case _:
            return ""


def _taken_by(function: ast.expr) -> str:
    """Return the name of a function that takes a setting as its first argument."""
    whole = ast.unparse(function)
    return whole if whole.startswith("os.") else last_name(function) or ""


def _argument(arguments: ast.arguments, default: ast.expr) -> str:
    """Return the name of the argument that has this default."""
    plain = [*arguments.posonlyargs, *arguments.args]
    pairs = zip(reversed(plain), reversed(arguments.defaults), strict=False)
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return next((one.arg for one, value in [*pairs, *named] if value is default), "")


def _is_option(node: ast.expr, context: Context) -> bool:
    """Return whether a constant is the default of an option of a command."""
    parent = context.module.parents[node]
    call = context.module.parents[parent] if isinstance(parent, ast.keyword) else parent
    if not isinstance(call, ast.Call) or not _OPTIONS.search(ast.unparse(call.func)):
        return False
    if isinstance(parent, ast.keyword):
        return parent.arg == "default"
    return "Option" in ast.unparse(call.func) or "DEFINE" in ast.unparse(call.func)


def _option(call: ast.AST) -> str:
    """Return the last name by which a call declares an option."""
    assert isinstance(call, ast.Call)
    texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
    names = [text for text in texts if isinstance(text, str) and not _CUDA.match(text)]
    return names[-1] if names else ""
