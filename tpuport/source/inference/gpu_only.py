"""Detection of code that never runs on a TPU: CUDA kernels and branches for other devices."""

import ast
import re
from collections.abc import Sequence

from tpuport.source.syntax.module import FUNCTIONS, SCOPES, Function, Module

# Packages of kernels for NVIDIA GPUs. Without such a GPU they cannot be installed, or fail when
# they are imported or first called.
CUDA_PACKAGES = frozenset(
    {
        "flash_attn",
        "flash_attn_interface",
        "flash_attn_2_cuda",
        "flashinfer",
        "flash_mla",
        "xformers",
        "triton",
        "apex",
        "amp_C",
        "deepspeed",
        "bitsandbytes",
        "mamba_ssm",
        "causal_conv1d",
        "causal_conv1d_cuda",
        "selective_scan_cuda",
        "tensorrt",
        "fla",
        "torch_tensorrt",
        "sageattention",
        "sageattn3",
        "spas_sage_attn",
        "vllm",
        "sgl_kernel",
        "transformer_engine",
        "liger_kernel",
        "flex_block_attn",
        "block_sparse_attn",
        "cupy",
        "pycuda",
        "cutlass",
        "deep_gemm",
        "deep_ep",
        "nunchaku",
        "exllamav2",
        "auto_gptq",
        "gptqmodel",
        "awq",
        "spconv",
        "torchsparse",
        "MinkowskiEngine",
        "nvdiffrast",
        "gsplat",
        "diff_gaussian_rasterization",
        "tinycudann",
        "lightseq",
        "rotary_emb",
        "dropout_layer_norm",
        "fused_dense_lib",
        "xentropy_cuda_lib",
        "tilelang",
        "lmdeploy",
        "tensorrt_llm",
        "angelslim",
    }
)
# The same for these and other accelerators.
_DEVICE_PACKAGES = CUDA_PACKAGES | {
    "aiter",
    "habana_frameworks",
    "torch_mlu",
    "torch_musa",
    "torch_npu",
}


def find_gpu_only(module: Module, calls: dict[Function, list[Function]]) -> set[Function]:
    """Return the functions of a file that use such a package on every path through them.

    Args:
        module: The file.
        calls: For each function the functions of the file that it mentions.
    """
    kernels = {
        name
        for name, full in module.imports.items()
        if full.lstrip(".").partition(".")[0] in _DEVICE_PACKAGES
    }
    if not kernels:
        return set()
    kernels |= _aliases(module, kernels)
    found: set[Function] = set()
    while True:
        names = kernels | {function.name for function in found}
        more = {
            function
            for function, callees in calls.items()
            if function not in found
            and (kernels & _names(function) or found.intersection(callees))
            and _always_uses(function.body, names)
        }
        if not more:
            return found
        found |= more


def _aliases(module: Module, kernels: set[str]) -> set[str]:
    """Return the names that assignments make aliases of kernels: `flash, varlen = _flash, _var`."""
    found: set[str] = set()
    for node in module.by_class.get(ast.Assign, []):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=False))
            else:
                pairs = [(target, value)]
            for name, given in pairs:
                if isinstance(name, ast.Name) and isinstance(given, ast.Name):
                    found.update({name.id} if given.id in kernels else ())
    return found


def _names(function: Function) -> set[str]:
    return {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}


def _always_uses(statements: Sequence[ast.stmt], names: set[str]) -> bool:
    """Return whether statements use one of `names` on every path that does not raise.

    Loop bodies are assumed to run.
    """
    for statement in statements:
        match statement:
            case ast.If(test=test, body=body, orelse=orelse):
                both = _always_uses(body, names) and _always_uses(orelse, names)
                found = both or _uses(test, names)
            case ast.Try(body=body, handlers=handlers, finalbody=last):
                raises = all(isinstance(handler.body[-1], ast.Raise) for handler in handlers)
                found = (raises and _always_uses(body, names)) or _always_uses(last, names)
            case ast.Raise():
                found = True
            case ast.With(body=body) | ast.For(body=body) | ast.While(body=body):
                found = _always_uses(body, names)
            case _:
                found = _uses(statement, names)
        if found:
            return True
    return False


def _uses(code: ast.AST, names: set[str]) -> bool:
    """Return whether code reads one of `names`, leaving out nested functions: they run later."""
    if isinstance(code, SCOPES) or isinstance(code, FUNCTIONS):
        return False
    match code:
        case ast.Name(id=name):
            return name in names
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
            return name in names
        case _:
            return any(_uses(child, names) for child in ast.iter_child_nodes(code))


_AVAILABLE = re.compile(
    r"^(is|has)_(torch_)?(flash|xformers|triton|apex|sage|cuda|deepspeed|mamba|npu|xpu|mps|mlu|musa"
    r"|hpu)\w*$"
)
# Names of flags, and values of settings, that choose kernels for CUDA.
_CHOSEN = re.compile(r"(^|_)use_(flash|xformers|triton|apex|sage|cuda|memory_efficient)\w*$")
_KERNELS = re.compile(r"^(cuda|flash|xformers|triton|apex|sage|mps$|npu|xpu|mlu$|hpu$)")
_IS_OTHER_DEVICE = frozenset({"is_cuda", "is_mps", "is_npu", "is_xpu"})
_OTHER_DEVICES = ("cuda", "mps", "xpu", "npu")


def is_off_tpu(node: ast.AST, module: Module) -> bool:
    """Return whether code is in a branch taken only on other devices, or on several devices."""
    child = node
    for parent in module.ancestors(node):
        tests = [test for test in _before(parent, child) if not _starts_processes(parent, test)]
        if any(map(asks_for_gpu, tests)):
            return True
        if isinstance(parent, (*FUNCTIONS, ast.ClassDef)):
            return False
        child = parent
    return False


def is_for_processes(node: ast.AST, module: Module) -> bool:
    """Return whether code is in a branch taken only in one of several processes."""
    child = node
    for parent in module.ancestors(node):
        if any(_starts_processes(parent, test) for test in _before(parent, child)):
            return True
        if isinstance(parent, (*FUNCTIONS, ast.ClassDef)):
            return False
        child = parent
    return False


def _starts_processes(parent: ast.AST, test: ast.expr) -> bool:
    """Return whether an `if` asks first of all whether there is a process group."""
    while isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        test = test.values[0]
    match test:
        case ast.Call(func=ast.Attribute(attr="is_initialized")):
            return isinstance(parent, ast.If)
        case _:
            return False


def _before(parent: ast.AST, child: ast.AST) -> list[ast.expr]:
    """Return the tests of a node that are true where its child runs."""
    match parent:
        case ast.If(test=test, body=body) if child in body:
            return [test]
        case ast.IfExp(test=test, body=body) if child is body:
            return [test]
        case ast.BoolOp(op=ast.And(), values=values):
            return values[: next(i for i, value in enumerate(values) if value is child)]
        case _:
            return []


def asks_for_gpu(test: ast.expr) -> bool:
    """Return whether a test is true only with CUDA, its kernels or dtype, or with other devices."""
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            return any(map(asks_for_gpu, values))
        case ast.Call(func=ast.Attribute(attr="is_initialized" | "is_in_onnx_export")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=name), attr="is_available")):
            return name in _OTHER_DEVICES
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return _AVAILABLE.search(name) is not None
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name in _IS_OTHER_DEVICE or _CHOSEN.search(name) is not None
        case ast.Compare(
            left=ast.Attribute(attr="device"),
            ops=[ast.NotEq()],
            comparators=[ast.Attribute(attr="device")],
        ):
            return True
        case ast.Compare(ops=[ast.Eq()], comparators=[ast.Attribute(attr="float16" | "half")]):
            return True  # a TPU computes in bfloat16
        case ast.Compare(ops=[ast.Eq()], comparators=[ast.Constant(value=str(value))]):
            return _KERNELS.match(value) is not None
        case ast.Compare(
            ops=[ast.In()], comparators=[ast.Tuple() | ast.List() | ast.Set() as several]
        ):
            return all(
                isinstance(value, ast.Constant) and _KERNELS.match(str(value.value)) is not None
                for value in several.elts
            )
        case _:
            return False
