"""TPU515: a call of torch.distributed that needs a process group."""

import ast

from tpuport.rules._cuda_facts import GROUP_WRAPPERS, NEED_GROUP, NOTHING_ALONE, VALUES_ALONE
from tpuport.rules._devices import is_guarded, refuse_guarded, severity
from tpuport.rules._groups import ASKS_GROUP, follows_a_start, has_group, is_chosen
from tpuport.rules._guarding import chosen, guarded_statement
from tpuport.rules._rule import Example, Rule
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context

PACKAGE = "torch.distributed."


class DistributedCall(Rule):
    """A call of `torch.distributed` that needs a process group.

    ## What it does
    Finds collectives, `get_rank`, `new_group`, `DistributedDataParallel` and the like where no test
    of `is_initialized()`, of the world size or of a flag guards them. The fix makes `get_rank()`
    0 and `get_world_size()` 1 without a process group, and runs a barrier, a broadcast or an
    `all_reduce` only with one. A call on a branch or in a function that deals with groups is host
    code for GPUs, and so is a collective of a step behind such a test. Host code in a file that
    starts the group itself is only noted, but for the start.

    ## Why is this bad?
    A ported program is one process that drives all chips; no process group exists, and the call
    raises. In a traced step the compiler inserts the collectives, where tensors are sharded.

    ## Fix safety
    The fix is exact: with a process group the same call is made; without one the original raises.

    ## References
    https://pytorch.org/docs/stable/distributed.html
    """

    CODE = "TPU515"
    MESSAGE = "`{call}` needs a process group, which a ported program does not have"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch
            import torch.distributed as dist


            def forward(x: torch.Tensor):
                total = x.sum()
                dist.all_reduce(total, op=dist.ReduceOp.SUM)
                return total / dist.get_world_size()
            """,
            after="""
            import torch
            import torch.distributed as dist


            def forward(x: torch.Tensor):
                total = x.sum()
                if dist.is_initialized():
                    dist.all_reduce(total, op=dist.ReduceOp.SUM)
                return total / (dist.get_world_size() if dist.is_initialized() else 1)
            """,
            reference="""
            def forward(x):
                return x.sum() / 1
            """,
            jit_error="ValueError",
        ),
        Example(
            before="""
            import torch
            from torch.distributed import all_gather


            def forward(x: torch.Tensor):
                gathered = [torch.zeros_like(x)]
                all_gather(gathered, x)
                return gathered[0]
            """,
            left="depends on the other processes",
            jit_error="ValueError",
        ),
    )
    CLEAN = (
        """
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP


        def forward(x: torch.Tensor, sp_size: int = 1, use_ddp: bool = False):
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(x)
            rank = dist.get_rank() if dist.is_initialized() else 0
            if not dist.is_initialized() or dist.get_rank() == 0:
                print("forward")
            if use_ddp:
                dist.barrier()
            return x * (rank + 1)


        def world_size():
            if not dist.is_available():
                return 1
            if not dist.is_initialized():
                return 1
            return dist.get_world_size()


        def wrap(model, use_ddp, local_rank):
            return DDP(model, device_ids=[local_rank]) if use_ddp else model


        def isinstance_of(model):
            return model.module if isinstance(model, DDP) else model
        """,
        """
        import torch


        class Group:
            def all_reduce(self, x: torch.Tensor):
                return x

            def forward(self, x: torch.Tensor):
                return self.all_reduce(x).scatter(0, x.long(), x).gather(0, x.long())
        """,
    )

    def visit_Call(self, node: ast.Call, context: Context) -> None:
        name = context.name(node.func) or ""
        function = name.removeprefix(PACKAGE)
        if name not in GROUP_WRAPPERS and (function == name or function not in NEED_GROUP):
            return
        if is_guarded(node, context.module, ASKS_GROUP):
            moves = function not in VALUES_ALONE and "barrier" not in function
            if moves and context.in_step(node):
                context.report(self, node, call=node, severity=Severity.DEVICE)
            return
        reached = Severity.DEVICE if is_chosen(node, context.module) else Severity.ERROR
        found = severity(node, context, reached)
        asks_given = function in VALUES_ALONE and has_group(node)
        if found is Severity.DEVICE and (asks_given or follows_a_start(node, context)):
            found = Severity.NOTE
        context.report(self, node, call=node, severity=found)

    def fix(self, node: ast.AST, context: Context) -> Fix:
        assert isinstance(node, ast.Call)
        refuse_guarded(node, context.module, ASKS_GROUP)
        function = (context.name(node.func) or "").removeprefix(PACKAGE)
        dotted = context.module.source(node.func).rpartition(".")[0]
        if not dotted or has_group(node):
            raise NotFixable("its result depends on the other processes")
        test = f"{dotted}.is_initialized()"
        parent = context.module.parents[node]
        if function in NOTHING_ALONE and isinstance(parent, ast.Expr):
            return guarded_statement(parent, test, context)
        if function in VALUES_ALONE and not node.args and not node.keywords:
            return Fix((chosen(node, test, VALUES_ALONE[function], context),))
        raise NotFixable("its result depends on the other processes")
