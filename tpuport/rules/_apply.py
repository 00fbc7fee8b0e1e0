"""Every rule applied to source text or to a loaded function."""

from collections.abc import Callable, Collection
from typing import Any

from tpuport.rules._discovery import find_rules, live_rules
from tpuport.source.rewrite import live, matching, rewriter
from tpuport.source.rewrite.finding import Finding


def find(source: str, **options: Any) -> list[Finding]:
    """Return what rules say about Python source: `source.engine.find`, by default with every rule.

    Raises:
        SyntaxError: the source is not Python.
    """
    return matching.find(source, **{"rules": find_rules(), **options})


def rewrite(source: str, **options: Any) -> rewriter.RewriteResult:
    """Apply fixes to Python source: `source.rewriter.rewrite`, by default of every rule.

    Raises:
        SyntaxError: the source is not Python.
        NotSettledError: rules undo each other's work.
    """
    return rewriter.rewrite(source, **{"rules": find_rules(), **options})


def rewrite_function(
    function: Callable[..., Any], *, sites: Collection[Any]
) -> live.LiveRewrite | live.Refusal:
    """Rewrite lines of a loaded function: `source.live.rewrite_function` with every live rule.

    Raises:
        NotSettledError: rules undo each other's work.
    """
    return live.rewrite_function(function, sites=sites, rules=live_rules())
