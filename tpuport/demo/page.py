"""Several port reports as one HTML page with a tab for each. It loads no external files."""

from tpuport.foundation.reporting.templates import render
from tpuport.reports.report import PortReport


def to_page(reports: list[PortReport]) -> str:
    """Write one page that shows the first report."""
    return render("demo/templates/page.html.j2", reports=reports)
