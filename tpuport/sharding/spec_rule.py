"""One line of a table of sharding rules."""

import re
from dataclasses import dataclass

from jax.sharding import PartitionSpec as P

from tpuport.foundation.interop import name_patterns
from tpuport.sharding.specs import as_spec, shown


@dataclass(frozen=True)
class SpecRule:
    """One line of a table: the parameters and buffers whose fqn matches `pattern` get `spec`.

    Attributes:
        pattern: see `name_patterns.compiled`: `*` within a part, `**` for any parts, or
            `re:` and a regular expression.
        spec: an axis name, a tuple of names or None for each dim; dims left out are unsharded.
        reason: reason for the rule, shown in the table.
        optional: whether not to report it when nothing matches (a bias that some models lack).
        cost: communication that the choice costs, if it is known to be avoidable.
    """

    pattern: str
    spec: P
    reason: str = ""
    optional: bool = False
    cost: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.pattern, re.Pattern):
            object.__setattr__(self, "pattern", name_patterns.REGEX_PREFIX + self.pattern.pattern)
        name_patterns.compiled(self.pattern)
        object.__setattr__(self, "spec", as_spec(self.spec, self.pattern))

    def matches(self, name: str) -> bool:
        """Return whether the rule applies to a name."""
        return name_patterns.matches(self.pattern, name)

    def __str__(self) -> str:
        return f"{self.pattern}: {shown(self.spec)}"
