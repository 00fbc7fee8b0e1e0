"""Roles of code: part of the traced step, of set-up before it, or of the host around both."""

import ast
import re
from collections.abc import Iterator
from enum import Enum
from functools import cached_property
from pathlib import PurePath

from tpuport.source.inference.classes import ClassInfo, find_classes
from tpuport.source.inference.gpu_only import find_gpu_only
from tpuport.source.inference.parameters import (
    annotated,
    attributes_used,
    is_used_like_a_tensor,
    names_another_class,
    returns_host,
)
from tpuport.source.inference.torch_facts import is_operation
from tpuport.source.inference.values import contains_traced
from tpuport.source.syntax.imported import qualified_name
from tpuport.source.syntax.module import FUNCTIONS, Function, Module
from tpuport.source.syntax.names import all_arguments


class Role(Enum):
    """The part of a program that code belongs to.

    `STEP` is `forward`, a training step, or what they call: it is traced. `SETUP` runs before:
    imports, constructors, weight loading. `HOST` runs around the step and is never traced: data
    loading, logging, scripts.
    """

    STEP = "step"
    SETUP = "setup"
    HOST = "host"


STEP_FUNCTION = re.compile(
    r"^(forward\w*|__call__|training_step|train_step|loss_fn|compute_loss|get_action|step_fn)$"
)
# Entry points of a module besides `forward`, whatever their parameters look like.
SAMPLING = re.compile(r"^(sample|generate|predict|infer|denoise|decode|encode|act|select_action)")
SETUP_FUNCTION = re.compile(
    r"^(__init__|__post_init__|__new__|__init_subclass__|_?init_\w+|_?initiali[sz]e\w*"
    r"|reset_parameters|post_init|setup\w*|from_\w+|_?load_\w+|_?build_\w*|make_config|create_\w+"
    r"|configure_\w+|_?set_(?!cos)\w+|_?register_\w+|_?convert_\w+|_?replace_\w+|tie_weights"
    r"|fuse_\w+|unfuse_\w+|resize_\w+|_resize_\w+|freeze\w*|unfreeze\w*|enable_\w+|disable_\w+)$"
)
HOST_FUNCTION = re.compile(
    r"^(main|_?save_\w+|_?log_\w+|_?plot\w*|_?visuali[sz]e\w*|_?print_\w+|parse_\w+|get_args"
    r"|collate\w*|\w*_collate_fn|tokeni[sz]e\w*|preprocess_(text|image|prompt)\w*|download\w*"
    r"|\w*chat|extra_repr|__(?!call__|init__)\w+__|_?export\w*|\w+_for_generation|_?write_\w+"
    r"|_?(de)?serialize\w*|_?post_?process\w*"
    r"|\w*state_dict\w*|\w*_dataloader|worker_\w+|evaluate|validate|eval_\w+|test_\w+|benchmark\w*)$"
)
# Files whose functions run on the host unless a step calls them.
HOST_FILE = re.compile(
    r"(^|_)(data|datasets?|dataloaders?|loader|tokeniz\w*|tokenization|preprocess\w*|processing"
    r"|(image|video|audio|vae|logits)_processors?|extraction|eval|evaluation|evaluate|metrics?|plot\w*|visuali[sz]\w*|logg\w*|config\w*"
    r"|configuration|download|convert\w*|conversion|scheduling|schedulers?|pipelines?|scripts?|tests?"
    r"|demo|server?|serving|cli|setup|conftest|benchmarks?|image_processing|video_utils|conversation"
    r"|generation|trainers?|streamers?|export\w*|debug\w*|testing|transforms)"
    r"(_|$)"
)
HOST_FOLDERS = frozenset(
    {
        "data",
        "dataset",
        "datasets",
        "dataloader",
        "dataloaders",
        "eval",
        "evaluation",
        "scripts",
        "tools",
        "test",
        "tests",
        "demo",
        "demos",
        "serving",
        "pipelines",
        "schedulers",
        "conversion",
        "benchmark",
        "benchmarks",
        "preprocess",
        "preprocessing",
        "processing",
        "tokenizers",
        "viz",
        "visualization",
        "metrics",
        "generation",
        "exporters",
        "testing",
    }
)
# Packages for files, networks, images and sound, which a step never uses.
_HOST_PACKAGES = frozenset(
    {
        "requests",
        "urllib",
        "socket",
        "subprocess",
        "shutil",
        "tempfile",
        "json",
        "pickle",
        "PIL",
        "cv2",
        "av",
        "imageio",
        "matplotlib",
        "soundfile",
        "librosa",
        "pandas",
        "h5py",
        "safetensors",
        "huggingface_hub",
        "wandb",
    }
)
# Functions of other packages that look at files.
_HOST_CALL = re.compile(
    r"^(torch\.(load|save)|numpy\.(load\w*|save\w*|fromfile|genfromtxt)|glob\.\w+"
    r"|os\.(path\.(exists|is\w+|getsize|getmtime)|listdir|scandir|walk|makedirs|mkdir))$"
)
# Parameters of loops that generate tokens: such a loop runs one step per round.
_HOST_PARAMETERS = frozenset(
    {"tokenizer", "streamer", "logits_processor", "stopping_criteria", "trainer", "pl_module"}
)
_TRACERS = frozenset({"jit", "grad", "value_and_grad", "vmap", "compile", "checkpoint", "jax_jit"})


class Roles:
    """The roles of the functions of one file.

    Args:
        module: The file.
        reached: Names of its functions (`name` or `Class.name`) that a step in another file calls.
    """

    def __init__(self, module: Module, *, reached: frozenset[str] = frozenset()) -> None:
        self.module = module
        self.reached = reached
        self._calls: dict[Function, list[Function]] = {}
        self._used: dict[Function, dict[str, set[str]]] = {}
        self._off_tpu: set[Function] = set()
        self.classes = find_classes(module)
        self.owners: dict[Function, ClassInfo] = {
            method: info for info in self.classes.values() for method in info.methods.values()
        }
        self.functions: dict[str, Function] = {
            node.name: node for node in module.tree.body if isinstance(node, FUNCTIONS)
        }

    @property
    def everything(self) -> list[Function]:
        """Return the functions and methods of the file, without nested ones."""
        return [*self.functions.values(), *self.owners]

    def of(self, node: ast.AST) -> Role:
        """Return the role of the code at a node."""
        function = self.outermost(node)
        if function is None:
            return Role.SETUP
        return self._roles.get(function, Role.HOST)

    def outermost(self, node: ast.AST) -> Function | None:
        """Return the outermost function around a node, which may be the node itself, or None."""
        function = self.module.outermost_function(node)
        return function if isinstance(function, FUNCTIONS) else None

    @cached_property
    def is_host_file(self) -> bool:
        """Return whether the file's functions run on the host unless a step calls them."""
        path = PurePath(self.module.file)
        if HOST_FILE.search(path.stem) or any(part in HOST_FOLDERS for part in path.parts[-3:-1]):
            return True
        return self.module.is_script

    @cached_property
    def is_about_arrays(self) -> bool:
        """Return whether the file uses numpy and not torch, so that what it is given are arrays."""
        roots = {full.lstrip(".").partition(".")[0] for full in self.module.imports.values()}
        return "numpy" in roots and roots.isdisjoint(("torch", "jax", "einops"))

    @cached_property
    def steps(self) -> list[Function]:
        """Return the functions of steps, starting with those that no other step here calls."""
        called = {
            callee for f, r in self._roles.items() if r is Role.STEP for callee in self.calls(f)
        }
        steps = [function for function, role in self._roles.items() if role is Role.STEP]
        return sorted(steps, key=lambda function: function in called)

    @cached_property
    def _roles(self) -> dict[Function, Role]:
        own = {function: self._own(function) for function in self.everything}
        sure = [f for f, (role, is_sure) in own.items() if role is Role.STEP and is_sure]
        reached = self._closure(sure)
        behind_kernels = self._closure(list(self.gpu_only), through_kernels=True) - reached
        by_host = self._closure(
            [f for f, (role, _) in own.items() if role is not Role.STEP and f not in reached]
        )
        roles: dict[Function, Role] = {}
        for function, (role, is_sure) in own.items():
            if function in self.gpu_only or (function in behind_kernels and not is_sure):
                roles[function] = role
                self._off_tpu.add(function)
            elif function in reached:
                roles[function] = Role.STEP
            elif role is Role.STEP and not is_sure and self._is_helper(function, by_host):
                roles[function] = Role.HOST
            else:
                roles[function] = role
        # What a step calls is traced, whatever its own name and text suggest.
        on_tpu = [f for f, role in roles.items() if role is Role.STEP and f not in self._off_tpu]
        for function in self._closure(on_tpu):
            roles[function] = Role.STEP
            self._off_tpu.discard(function)
        return roles

    def is_off_tpu(self, node: ast.AST) -> bool:
        """Return whether code is in a function that only GPUs run, for its package of kernels."""
        function = self.outermost(node)
        return function is not None and function in self._roles and function in self._off_tpu

    def _is_helper(self, function: Function, by_host: set[Function]) -> bool:
        """Return whether a presumed step function only helps host code of this file."""
        owner = self.owners.get(function)
        is_private = function.name.startswith("_")
        return function in by_host and (owner is None or not owner.is_module or is_private)

    @cached_property
    def gpu_only(self) -> set[Function]:
        """Return the functions that need a package of CUDA kernels, so that no TPU runs them."""
        return find_gpu_only(self.module, {f: self.calls(f) for f in self.everything})

    def _closure(self, roots: list[Function], *, through_kernels: bool = False) -> set[Function]:
        found: set[Function] = set()
        pending = list(roots)
        while pending:
            function = pending.pop()
            if function not in found and (through_kernels or function not in self.gpu_only):
                found.add(function)
                pending.extend(callee for callee in self.calls(function) if self._follows(callee))
        return found

    def _follows(self, callee: Function) -> bool:
        # A step may construct a module or look at weights, which traces nothing.
        return callee.name != "__init__"

    def calls(self, function: Function) -> list[Function]:
        """Return the functions of this file that a function mentions, called or passed on."""
        if function not in self._calls:
            self._calls[function] = list(self._mentioned(function))
        return self._calls[function]

    def _mentioned(self, function: Function) -> Iterator[Function]:
        owner = self.owners.get(function)
        for node in self.module.inside(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                if node.id in self.functions:
                    yield self.functions[node.id]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                info = (
                    owner if node.value.id in ("self", "cls") else self.classes.get(node.value.id)
                )
                found = info.method(node.attr) if info is not None else None
                if found is not None:
                    yield found

    # The role that a function's own text suggests.

    def _own(self, function: Function) -> tuple[Role, bool]:
        """Return a function's role, and whether that is certain rather than presumed."""
        owner = self.owners.get(function)
        name = function.name if owner is None else f"{owner.node.name}.{function.name}"
        if name in self.reached or self._is_handed_to_a_tracer(function):
            return Role.STEP, True
        if owner is not None:
            return self._own_of_method(function, owner)
        if SETUP_FUNCTION.search(function.name) and not self._takes_tensors(function):
            return Role.SETUP, True
        if HOST_FUNCTION.search(function.name):
            return Role.HOST, True
        if STEP_FUNCTION.search(function.name):
            return Role.STEP, True
        if self.is_host_file:
            return Role.HOST, False
        if returns_host(function) or self._works_on_host(function):
            return Role.HOST, False
        computes = self._takes_tensors(function) or self._calls_operations(function)
        return (Role.STEP if computes else Role.HOST), False

    def _own_of_method(self, function: Function, owner: ClassInfo) -> tuple[Role, bool]:
        name = function.name
        if name in ("forward", "training_step"):
            return Role.STEP, True
        if SETUP_FUNCTION.search(name):
            return Role.SETUP, True
        if HOST_FUNCTION.search(name) or owner.is_host:
            return Role.HOST, True
        parameters = {argument.arg for argument in all_arguments(function.args)}
        if not _HOST_PARAMETERS.isdisjoint(parameters):
            return Role.HOST, True
        if owner.is_module:
            return self._own_of_module_method(function)
        if returns_host(function):
            return Role.HOST, False
        if STEP_FUNCTION.search(name) and self._takes_tensors(function):
            return Role.STEP, True
        if self.is_host_file or self._works_on_host(function):
            return Role.HOST, False
        return (Role.STEP if self._takes_tensors(function) else Role.HOST), False

    def _own_of_module_method(self, function: Function) -> tuple[Role, bool]:
        if STEP_FUNCTION.search(function.name):
            return Role.STEP, True
        if returns_host(function):
            return Role.HOST, False
        if SAMPLING.search(function.name) and self._uses_a_module(function):
            return (Role.HOST, False) if _returns_array(function) else (Role.STEP, True)
        return (Role.STEP if self._takes_tensors(function) else Role.HOST), False

    def used(self, function: Function) -> dict[str, set[str]]:
        """Return the attributes that a function uses of each name."""
        if function not in self._used:
            self._used[function] = attributes_used(self.module.inside(function))
        return self._used[function]

    def _uses_a_module(self, function: Function) -> bool:
        """Return whether a method calls `self.something(...)`."""
        return any(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "self"
            for node in self.module.inside(function)
        )

    def _calls_operations(self, function: Function) -> bool:
        """Return whether a function with parameters calls torch functions that compute."""
        return bool(all_arguments(function.args)) and any(map(is_operation, self._called(function)))

    def _works_on_host(self, function: Function) -> bool:
        """Return whether a function calls what is for files, networks, images or sound."""
        return any(
            name.partition(".")[0] in _HOST_PACKAGES or _HOST_CALL.search(name)
            for name in self._called(function)
        )

    def _called(self, function: Function) -> Iterator[str]:
        """Yield the full names of the imported things that a function calls."""
        for node in self.module.inside(function):
            if isinstance(node, ast.Call):
                name = qualified_name(node.func, self.module.imports)
                if name is not None:
                    yield name

    def _takes_tensors(self, function: Function) -> bool:
        arguments = [a for a in all_arguments(function.args) if a.arg not in ("self", "cls")]
        known = [annotated(argument.annotation) for argument in arguments]
        if any(value is not None and contains_traced(value) for value in known):
            return True
        bare = [
            a.arg
            for a, value in zip(arguments, known, strict=True)
            if value is None and not names_another_class(a.annotation)
        ]
        if not bare or self.is_about_arrays:
            return False
        used = self.used(function)
        return any(is_used_like_a_tensor(used.get(name, ())) for name in bare)

    def _is_handed_to_a_tracer(self, function: Function) -> bool:
        if function.name in self.module.handed_to(_TRACERS):
            return True
        for decorator in function.decorator_list:
            node = decorator.func if isinstance(decorator, ast.Call) else decorator
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
            if name in _TRACERS:
                return True
        return False


def _returns_array(function: Function) -> bool:
    """Return whether a function hands out what it made a numpy array: images, audio."""
    arrays: set[str] = set()
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _makes_array(value):
                arrays.add(name)
            case ast.Return(value=ast.Name(id=name)) if name in arrays:
                return True
            case ast.Return(value=ast.Call() as value) if _makes_array(value):
                return True
            case _:
                pass
    return False


def _makes_array(value: ast.expr) -> bool:
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if value.func.attr == "numpy" and not value.args:
            return True
        value = value.func.value
    return False
