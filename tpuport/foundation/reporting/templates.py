"""HTML pages made from the templates that lie next to the code that fills them.

A template escapes every value that it writes: first what a terminal or a browser would obey becomes
visible (`visible`), then HTML's own characters are escaped. Only Markup is written as it is.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

from tpuport.foundation.reporting.markup import Markup, plural, visible

# Loaded when the first page is written: a lint at a terminal does without.
if TYPE_CHECKING:
    import jinja2


def render(template: str, **values: object) -> str:
    """Fill a template.

    Args:
        template: The path of the template within the package.
        values: What it shows; text is escaped, Markup is not.
    """
    return _environment().get_template(template).render(values)


@cache
def _environment() -> "jinja2.Environment":
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tpuport", ""),
        autoescape=True,
        finalize=_finalized,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"plural": plural, "thousands": "{:,}".format}
    environment.globals["css"] = _style_sheet
    return environment


def _finalized(value: Any) -> Any:
    """Return what a template writes for a value, before HTML's own characters are escaped."""
    return value if hasattr(value, "__html__") else visible(value)


def _style_sheet(path: str) -> Markup:
    environment = _environment()
    assert environment.loader is not None
    return Markup(environment.loader.get_source(environment, path)[0])
