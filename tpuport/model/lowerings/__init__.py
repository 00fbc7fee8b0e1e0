"""Op lowerings: one file a family, each function registered by a decorator.

The folder is walked at first use.

`lowering` registers a function on jax arrays (torch dtypes and Python scalars are passed unchanged;
a random op gets a `key`). Its result is converted to the shape and dtype that torch gives.
`special` registers a function on tensors, for ops that write state.
"""

from tpuport.model.lowerings._registry import LOWERINGS as LOWERINGS
from tpuport.model.lowerings._registry import SAME as SAME
from tpuport.model.lowerings._registry import SPECIALS as SPECIALS
from tpuport.model.lowerings._registry import Lowering as Lowering
from tpuport.model.lowerings._registry import find as find
from tpuport.model.lowerings._registry import load as load
from tpuport.model.lowerings._registry import lowering as lowering
from tpuport.model.lowerings._registry import special as special
