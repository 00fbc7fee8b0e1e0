"""HTML pages made from the templates that lie next to the code that fills them.

A template escapes every value that it writes: first what a terminal or a browser would obey becomes
visible (`visible`), then HTML's own characters are escaped. Only Markup is written as it is.
"""

from functools import cache, partial
from typing import TYPE_CHECKING, Any

from tpuport.foundation.reporting.markup import Markup, plural, visible

# Loaded when the first page is written: a lint at a terminal does without.
if TYPE_CHECKING:
    import jinja2


def render(template: str, package: str = "tpuport", /, **values: object) -> str:
    """Fill a template.

    Args:
        template: The path of the template within its package.
        package: The package. Templates of another one find those of tpuport, too.
        values: What it shows; text is escaped, Markup is not.
    """
    return _environment(package).get_template(template).render(values)


@cache
def _environment(package: str) -> "jinja2.Environment":
    import jinja2

    packages = dict.fromkeys((package, "tpuport"))
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name, "") for name in packages]),
        autoescape=True,
        finalize=_finalized,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"plural": plural, "thousands": "{:,}".format}
    environment.globals["css"] = partial(_style_sheet, environment)
    return environment


def _finalized(value: Any) -> Any:
    """Return what a template writes for a value, before HTML's own characters are escaped."""
    return value if hasattr(value, "__html__") else visible(value)


def _style_sheet(environment: "jinja2.Environment", path: str) -> Markup:
    assert environment.loader is not None
    return Markup(environment.loader.get_source(environment, path)[0])
