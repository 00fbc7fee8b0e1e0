"""Several port reports as one HTML page with a tab for each. It loads no external files."""

import html

from tpuport.reports.report import PortReport

_STYLE = """
:root { color-scheme: light dark }
html, body { height: 100%; margin: 0 }
body { display: flex; flex-wrap: wrap; align-content: flex-start }
label { font: 15px/1.4 system-ui, sans-serif }
input { position: absolute; opacity: 0 }
label { padding: .7rem 1.2rem; border-bottom: 3px solid transparent; cursor: pointer }
input:checked + label { border-color: currentColor; font-weight: 600 }
input:focus-visible + label { outline: 2px solid Highlight; outline-offset: -4px }
iframe { display: none; order: 1; width: 100%; height: calc(100vh - 3.2rem); border: 0 }
input:checked + label + iframe { display: block }
"""


def to_page(reports: list[PortReport]) -> str:
    """Write one page that shows the first report."""
    tabs = []
    for number, report in enumerate(reports):
        checked = " checked" if number == 0 else ""
        title = html.escape(report.model)
        page = html.escape(report.to_html())
        tabs.append(
            f'<input type="radio" name="tab" id="tab{number}"{checked}>'
            f'<label for="tab{number}">{title}</label>'
            f'<iframe title="{title}" srcdoc="{page}"></iframe>'
        )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>tpuport demo</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(tabs)}</body></html>\n"
    )
