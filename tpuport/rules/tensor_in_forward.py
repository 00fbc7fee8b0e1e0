"""TPU417: a tensor made in the step without a device."""

import ast

from tpuport.rules._appending import with_argument
from tpuport.rules._meeting import cpu_creations, sure_tensor
from tpuport.rules._rule import Example, Rule
from tpuport.rules._state import runs_in_step
from tpuport.source.rewrite.finding import Fix, NotFixable, Safety, Severity
from tpuport.source.rewrite.matching import Context
from tpuport.source.syntax.module import Function


class TensorInForward(Rule):
    """A tensor that a step makes on the CPU.

    ## What it does
    Finds `torch.arange`, `zeros`, `tensor` and their like without a device in a step, where the
    result has several elements and meets a traced tensor in an operation. The fix adds the device
    of that tensor. A tensor that meets none within the function is a note.

    ## Why is this bad?
    Without a device the tensor is a CPU tensor. torchax refuses to mix one with a traced tensor,
    unless it has a single element, and raises `AssertionError`.

    ## Fix safety
    The fix is exact: where the two tensors were not on one device before, eager PyTorch raised.
    There is none where no parameter is surely a tensor.

    ## References
    https://docs.pytorch.org/docs/stable/tensor_attributes.html#torch.device
    """

    CODE = "TPU417"
    MESSAGE = "`{call}` is a CPU tensor{meets}"
    SAFETY = Safety.EXACT
    SEVERITY = Severity.ERROR

    EXAMPLES = (
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor):
                places = torch.arange(x.shape[-1], dtype=torch.float32)[None]
                weights = torch.tensor(
                    [1.0, 2.0, 3.0, 4.0],
                )
                return torch.where(x > 0, x * weights, places * 2)
            """,
            after="""
            import torch


            def forward(x: torch.Tensor):
                places = torch.arange(x.shape[-1], dtype=torch.float32, device=x.device)[None]
                weights = torch.tensor(
                    [1.0, 2.0, 3.0, 4.0], device=x.device,
                )
                return torch.where(x > 0, x * weights, places * 2)
            """,
            jit_error="AssertionError",
        ),
        Example(
            before="""
            import torch


            def forward(x: torch.Tensor | None):
                return torch.cat([x * 2, torch.zeros(1, 4)])
            """,
            jit_error="AssertionError",
            left="no parameter",
        ),
    )
    CLEAN = (
        """
        import torch


        def forward(x: torch.Tensor, n: int = 3):
            scale = torch.tensor(2.0)
            one = torch.ones(1)
            table = torch.arange(n).to(x.device)
            zeros = torch.zeros(4, device=x.device)
            rows = torch.arange(4).type_as(x)
            sizes = torch.tensor([2, 3]).tolist()
            return x * scale + one + table.sum() + zeros * len(sizes) + x.new_zeros(4) + rows
        """,
        """
        import torch


        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.table = torch.arange(4) * torch.ones(4)

            def forward(self, x: torch.Tensor):
                with torch.device(x.device):
                    places = torch.arange(4)
                return x + places
        """,
        """
        import torch


        def table(count):
            step = 3.0 / count
            step = torch.exp(torch.arange(count).float() * -step)
            step = torch.arange(4).float().unsqueeze(1) * step.unsqueeze(0)
            return torch.cat([step, torch.zeros(4, 1)], dim=1)


        def forward(x: torch.Tensor):
            return x * table(3).to(x.device)
        """,
    )

    def visit_FunctionDef(self, node: Function, context: Context) -> None:
        # A nested function is searched with the outermost one.
        if context.module.function(node) is not None or not runs_in_step(node.body[0], context):
            return
        for call, meeting in cpu_creations(node, context).items():
            if meeting is None:
                text = ": name a device if a traced tensor meets it"
                context.report(self, call, severity=Severity.NOTE, call=call, meets=text)
            else:
                text = f", which meets a traced one on line {context.module.origin(meeting)}"
                context.report(self, call, call=call, meets=text)

    visit_AsyncFunctionDef = visit_FunctionDef

    def fix(self, node: ast.AST, context: Context) -> Fix:
        assert isinstance(node, ast.Call)
        function = context.module.function(node)
        outermost = context.module.outermost_function(node)
        assert isinstance(outermost, Function)
        if cpu_creations(outermost, context).get(node) is None:
            raise NotFixable("no traced tensor is known to meet it")
        name = None if function is not outermost else sure_tensor(outermost, context)
        if name is None:
            raise NotFixable("no parameter that is surely a tensor has a device to take")
        return with_argument(node, f"device={name}.device", context)
