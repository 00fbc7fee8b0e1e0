"""The classes of a file, and which of them are modules of PyTorch."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tpuport.source.inference.values import Value
from tpuport.source.syntax.imported import dotted_name, qualified_name
from tpuport.source.syntax.module import FUNCTIONS, Function, Module

_MODULE_BASE = re.compile(
    r"(Module|PreTrainedModel|PretrainedModel|ModelMixin|Layer|Block|Attention|Encoder|Decoder"
    r"|Embeddings?|Head|Backbone|Norm|Linear|Conv[123]d|ForCausalLM|Transformer|MLP|Model)$"
)
# Named like modules, and none of PyTorch's.
_OTHER_BASE = re.compile(r"^(pydantic\.|flax\.|keras\.|tf\.|tensorflow\.)|(^|\.)(TF|Flax)[A-Z]")
_DATA_BASE = re.compile(r"(Dataset|Sampler|DataModule|Builder|DataLoader|Collator)$")
_HOST_BASE = re.compile(
    r"(Pipeline|PipelineBlocks|Scheduler|SchedulerMixin|ProcessorMixin|Tokenizer|TokenizerFast|Config|Extractor|ExtractionMixin"
    r"|(Image|Video|Audio|Vae|Text|Feature|Logits)\w*Processor\w*"
    r"|LogitsWarper|StoppingCriteria|Streamer|CandidateGenerator|Generation\w*Mixin"
    r"|Callback|Trainer|TestCase|Enum|Exception|Error|Output|NamedTuple|Dict)$"
)


@dataclass(eq=False)
class ClassInfo:
    """A class of the file.

    Attributes:
        node: Its definition.
        bases: Its bases outside of this file by full name, or as written if they are not imported.
        methods: Its own methods by name.
        parents: Its bases that this file defines.
        attributes: The abstract value of each `self.name` known so far.
    """

    node: ast.ClassDef
    bases: tuple[str, ...]
    methods: dict[str, Function]
    parents: "list[ClassInfo]" = field(default_factory=list["ClassInfo"])
    attributes: dict[str, Value] = field(default_factory=dict[str, Value])

    def lineage(self) -> "Iterator[ClassInfo]":
        """Yield the class and its bases in this file, nearest first."""
        seen: list[ClassInfo] = []
        pending: list[ClassInfo] = [self]
        while pending:
            one = pending.pop(0)
            if one not in seen:
                seen.append(one)
                yield one
                pending.extend(one.parents)

    def method(self, name: str) -> Function | None:
        """Return the method of this file that `self.name` resolves to, or None."""
        return next((one.methods[name] for one in self.lineage() if name in one.methods), None)

    def attribute(self, name: str) -> Value | None:
        """Return the abstract value of `self.name`, or None if nothing is known of it."""
        lineage = self.lineage()
        return next((one.attributes[name] for one in lineage if name in one.attributes), None)

    @property
    def outside_bases(self) -> list[str]:
        """Return the full names of the bases that other files define."""
        return [base for one in self.lineage() for base in one.bases]

    @property
    def is_module(self) -> bool:
        """Return whether the class is an `nn.Module`, judged by its bases or by a `forward`."""
        bases = self.outside_bases
        if any(_OTHER_BASE.search(base) for base in bases):
            return False
        if any(_MODULE_BASE.search(base) for base in bases):
            return True
        return self.method("forward") is not None and not self.is_data

    @property
    def is_data(self) -> bool:
        """Return whether the class loads data: a dataset, sampler, data module or the like."""
        names = [*self.outside_bases, self.node.name]
        return any(_DATA_BASE.search(name) for name in names) or "__getitem__" in self.methods

    @property
    def is_host(self) -> bool:
        """Return whether the class runs on the host: a pipeline, scheduler, processor, config."""
        if self.is_module:
            return False
        names = [*self.outside_bases, *(one.node.name for one in self.lineage())]
        return self.is_data or any(_HOST_BASE.search(name) for name in names)


def find_classes(module: Module) -> dict[str, ClassInfo]:
    """Return the classes of a file by name. If several share a name, the last one wins."""
    found: dict[str, ClassInfo] = {}
    for node in module.classes:
        methods = {each.name: each for each in node.body if isinstance(each, FUNCTIONS)}
        found[node.name] = ClassInfo(node, (), methods)
    for info in found.values():
        outside: list[str] = []
        for base in info.node.bases:
            if isinstance(base, ast.Subscript):
                base = base.value
            if isinstance(base, ast.Name) and base.id in found and found[base.id] is not info:
                info.parents.append(found[base.id])
            else:
                outside.append(qualified_name(base, module.imports) or dotted_name(base) or "")
        info.bases = tuple(outside)
    return found
