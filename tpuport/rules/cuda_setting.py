"""TPU519: a setting of host code that stands for CUDA."""

import ast
import re

from tpuport.rules._devices import AVAILABLE, is_guarded
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Safety, Severity
from tpuport.source.rewrite.matching import Context

_DEVICE = re.compile(r"(^|[-_])device$", re.IGNORECASE)
_CUDA = re.compile(r"^cuda(:\d+)?$")
_ATTENTION = re.compile(r"attn_impl|attention_impl|attn_implementation", re.IGNORECASE)
_FLASH = re.compile(r"^flash_attention_[23]$")
_BACKEND = re.compile(r"backend$", re.IGNORECASE)
# Calls that declare an option of a command, with the value that it has if it is left out.
_OPTIONS = re.compile(r"(add_argument|\boption|\bOption|\bArgument|DEFINE_\w+)$")


class CudaSetting(Rule):
    """A setting of host code that stands for CUDA.

    ## What it does
    Finds the values of scripts, configurations and argument parsers that a port has to change:
    a `--device` whose default is `"cuda"`, `"cuda" if torch.cuda.is_available() else "cpu"`,
    `attn_implementation="flash_attention_2"`, a `backend` of `"nccl"`, and arithmetic with
    `torch.cuda.device_count()`.

    ## Why is this bad?
    On a TPU machine the choice between CUDA and the CPU is the CPU, without a word; there are no
    CUDA devices to divide a rank by; FlashAttention and NCCL are not there. `tpuport run` answers
    all of these: the script stays as it is.

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
    )

    def visit_Constant(self, node: ast.Constant, context: Context) -> None:
        if not isinstance(node.value, str):
            return
        name = _setting(node, context)
        if _FLASH.match(node.value) and _ATTENTION.search(name):
            said = "the package flash_attn, which has kernels for CUDA alone"
        elif node.value == "nccl" and _BACKEND.search(name):
            said = "NCCL connects GPUs of NVIDIA"
        elif _CUDA.match(node.value) and _is_option(node, context) and _DEVICE.search(name):
            said = "a device that a TPU machine does not have"
        else:
            return
        if not is_guarded(node, context.module):
            self._say(node, said, context)

    def visit_IfExp(self, node: ast.IfExp, context: Context) -> None:
        body, other = ast.unparse(node.body), ast.unparse(node.orelse)
        chosen = "cuda" in body and "cpu" in other and "cuda" not in other
        if chosen and ast.unparse(node.test) == AVAILABLE and not context.in_step(node):
            self._say(node, "on a TPU machine this is the CPU, without a word", context)

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        if context.name(node.func) != "torch.cuda.device_count":
            return
        parent = context.module.parents[node]
        if isinstance(parent, ast.BinOp | ast.Assign | ast.AnnAssign | ast.keyword | ast.Return):
            if not is_guarded(node, context.module):
                self._say(node, "0 on a TPU machine", context)

    def _say(self, node: ast.expr, consequence: str, context: Context) -> None:
        parent = context.module.parents[node]
        shown = parent if isinstance(parent, ast.keyword) else node
        context.report(self, shown, code=context.module.source(shown), consequence=consequence)


def _setting(node: ast.Constant, context: Context) -> str:
    """Return the name of what a constant sets: a variable, an argument, a key or an option."""
    parent = context.module.parents[node]
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
        case _:
            return ""


def _argument(arguments: ast.arguments, default: ast.expr) -> str:
    """Return the name of the argument that has this default."""
    plain = [*arguments.posonlyargs, *arguments.args]
    pairs = zip(reversed(plain), reversed(arguments.defaults), strict=False)
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return next((one.arg for one, value in [*pairs, *named] if value is default), "")


def _is_option(node: ast.Constant, context: Context) -> bool:
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
