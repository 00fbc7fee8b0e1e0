"""TPU515: a call of torch.distributed that needs a process group."""

import ast
import re

from tpuport.rules._devices import is_guarded, severity
from tpuport.rules._guarding import guarded_statement
from tpuport.rules._rule import Example, Rule
from tpuport.source.engine import Context
from tpuport.source.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.text import Edit, Passage

PACKAGE = "torch.distributed."
# Words of a test after which code may take a process group for granted.
ASKS_GROUP = re.compile(
    r"initiali[sz]ed|is_available|world_size|rank|group|distributed|parallel|ddp|fsdp|dist\b"
    r"|num_processes|enable_sp|use_sp|multi_?(gpu|node|process)|torchrun|launch|WORLD|RANK",
    re.IGNORECASE,
)
# In one process they leave their tensor as it is.
_NOTHING_ALONE = frozenset({"barrier", "monitored_barrier", "all_reduce", "broadcast"})
_ALONE = {"get_rank": "0", "get_world_size": "1"}
_NEED_GROUP = frozenset(
    {
        *_NOTHING_ALONE,
        *_ALONE,
        *("all_gather", "all_gather_object", "all_gather_into_tensor", "broadcast_object_list"),
        *("reduce", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
        *("scatter", "gather", "gather_object", "scatter_object_list", "send", "recv", "isend"),
        *("irecv", "new_group", "new_subgroups", "get_backend", "init_process_group", "P2POp"),
        *("batch_isend_irecv", "get_process_group_ranks", "get_global_rank"),
        *("device_mesh.init_device_mesh", "init_device_mesh", "fsdp.FullyShardedDataParallel"),
        *("fsdp.fully_shard", "nn.all_gather", "nn.all_reduce", "nn.functional.all_gather"),
        *("nn.functional.all_reduce",),
    }
)
_WRAPPERS = frozenset(
    {
        *("torch.nn.parallel.DistributedDataParallel", "torch.nn.SyncBatchNorm.all_gather"),
        "torch.nn.parallel.distributed.DistributedDataParallel",
    }
)


class DistributedCall(Rule):
    """A call of `torch.distributed` that needs a process group.

    ## What it does
    Finds collectives, `get_rank`, `new_group`, `DistributedDataParallel` and the like where no test
    of `is_initialized()`, of the world size or of a flag guards them. The fix makes `get_rank()`
    0 and `get_world_size()` 1 without a process group, and runs a barrier, a broadcast or an
    `all_reduce` only with one. A call that is handed a group is only noted: who has made one has
    initialised it.

    ## Why is this bad?
    A ported program is one process that drives all chips; no process group exists, and the call
    raises. Inside a traced step collectives are the compiler's business: it inserts them where
    tensors are sharded.

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
        is_ours = name in _WRAPPERS or (function != name and function in _NEED_GROUP)
        if not is_ours or is_guarded(node, context.module, ASKS_GROUP):
            return
        reached = Severity.NOTE if _has_group(node) else Severity.ERROR
        context.report(self, node, call=node, severity=severity(node, context, reached))

    def fix(self, node: ast.AST, context: Context) -> Fix:
        assert isinstance(node, ast.Call)
        function = (context.name(node.func) or "").removeprefix(PACKAGE)
        dotted = context.module.source(node.func).rpartition(".")[0]
        if not dotted or _has_group(node):
            raise NotFixable("its result depends on the other processes")
        test = f"{dotted}.is_initialized()"
        parent = context.module.parents[node]
        if function in _NOTHING_ALONE and isinstance(parent, ast.Expr):
            return guarded_statement(parent, test, context)
        if function in _ALONE and not node.args and not node.keywords:
            origin = context.module.origin(node)
            start, end = context.module.span(node)
            call = Passage.of("(", origin) + context.module.copy_node(node)
            made = call + f" if {test} else {_ALONE[function]})"
            return Fix((Edit(start, end, made),))
        raise NotFixable("its result depends on the other processes")


def _has_group(call: ast.Call) -> bool:
    """Whether a call is handed a group, by name or as an argument that is called one."""
    named = [keyword.value for keyword in call.keywords if keyword.arg in {"group", "pg"}]
    called = [a for a in call.args if re.search(r"group|mesh|(^|\.)pg$", ast.unparse(a))]
    return any(not isinstance(value, ast.Constant) for value in [*named, *called])
