"""TPU518: data loading set up for a CUDA device."""

import ast

from tpuport.rules._devices import AVAILABLE, is_guarded
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.text import Edit, Passage

_LOADERS = (
    "torch.utils.data.DataLoader",
    "torch.utils.data.dataloader.DataLoader",
    "torchdata.stateful_dataloader.StatefulDataLoader",
)


class LoaderSettings(Rule):
    """Data loading set up for a CUDA device.

    ## What it does
    Finds `DataLoader(..., pin_memory=True)` and `tensor.pin_memory()`; the fix pins only with CUDA.
    Worker processes that are forked are noted.

    ## Why is this bad?
    Pinned memory is for copies to a CUDA device. With plain torchax imported, PyTorch finds an
    accelerator that cannot pin, so the first batch raises `RuntimeError`. `tpuport` undoes that,
    and then pinning does nothing. Workers forked inside torchax's environment may wait forever, as
    JAX has threads: load outside of it.

    ## Fix safety
    The fix is exact: where memory can be pinned for CUDA it still is.

    ## References
    https://pytorch.org/docs/stable/data.html#memory-pinning
    """

    CODE = "TPU518"
    MESSAGE = "`{code}`: {consequence}"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.SLOW

    EXAMPLES = (
        Example(
            before="""
            import torch
            from torch.utils.data import DataLoader


            def load():
                batches = torch.arange(12.0).reshape(1, 3, 4)
                return next(iter(DataLoader(batches, None, pin_memory=True)))


            def forward(x: torch.Tensor):
                return x + 1
            """,
            after="""
            import torch
            from torch.utils.data import DataLoader


            def load():
                batches = torch.arange(12.0).reshape(1, 3, 4)
                return next(iter(DataLoader(batches, None, pin_memory=torch.cuda.is_available())))


            def forward(x: torch.Tensor):
                return x + 1
            """,
            jit_error=None,
            harm="fails_beside_torchax",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                return x + torch.zeros(4).pin_memory()
            """,
            left="not an argument",
            jit_error=None,
            harm="fails_beside_torchax",
        ),
    )
    CLEAN = (
        """
        import torch
        from torch.utils.data import DataLoader


        def make(dataset, args, device):
            one = DataLoader(dataset, pin_memory=args.pin_memory, num_workers=args.workers)
            two = DataLoader(dataset, pin_memory=False, num_workers=0)
            three = DataLoader(dataset, pin_memory=torch.cuda.is_available())
            four = torch.zeros(4).to(device, non_blocking=True)
            return one, two, three, four


        def pin(batch):
            if torch.cuda.is_available():
                batch = batch.pin_memory()
            return batch


        class Batch:
            def __init__(self, pin_memory=True):
                self.pin_memory = pin_memory
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        if context.name(node.func) in _LOADERS:
            for keyword in node.keywords:
                self._look(keyword, node, context)
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "pin_memory":
            function = context.module.function(node)
            own = function is not None and function.name == "pin_memory"
            if not node.args and not own and not is_guarded(node, context.module):
                context.report(
                    self,
                    node,
                    code=node,
                    consequence="of no use to a TPU, and raises with plain torchax",
                )

    def _look(self, keyword: ast.keyword, call: ast.Call, context: Context) -> None:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if keyword.arg == "pin_memory" and value is True and not is_guarded(call, context.module):
            context.report(
                self,
                keyword,
                code=keyword,
                consequence="of no use to a TPU, and raises with plain torchax",
            )
        elif keyword.arg == "num_workers" and isinstance(value, int) and value > 0:
            context.report(
                self,
                keyword,
                severity=Severity.NOTE,
                code=keyword,
                consequence="forked inside torchax's environment, workers may wait forever",
            )

    def fix(self, node: ast.AST, context: Context) -> Fix:
        if not isinstance(node, ast.keyword) or node.arg != "pin_memory":
            raise NotFixable("it is not an argument `pin_memory`")
        start, end = context.module.span(node.value)
        choice = Passage.of(AVAILABLE, context.module.origin(node))
        return Fix((Edit(start, end, choice),), ("torch",))
