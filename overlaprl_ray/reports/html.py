"""A page that needs nothing but itself: tables, pictures as data, a few lines of style, no script.

page("Results", [heading("Summary"), table(texts, "What better means."), picture(figure, "Rewards by step")])
"""

import base64
import io
import warnings
from collections.abc import Iterable
from html import escape
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from overlaprl_ray.reports.figures import NOTE

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # a browser refuses all that is outside
STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 0 auto; padding: 0 16px 48px;
       max-width: 1180px; }
h1 { font-size: 1.7rem; margin: 24px 0 4px; } h2 { font-size: 1.25rem; margin: 36px 0 8px; }
p, li { max-width: 46rem; } code { font-size: .9em; overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: 8px 0; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 12px 4px 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e3e3e3; }
th { border-bottom: 2px solid #888; vertical-align: bottom; }
td { white-space: nowrap; } td.long { white-space: normal; min-width: 11rem; }
caption { caption-side: top; text-align: left; color: #555; font-size: .88rem; padding-bottom: 4px; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 16px 32px; }
figure { margin: 0; } figure img { width: 100%; height: auto; max-width: 720px; }
figure.broad { overflow-x: auto; } figure.broad img { max-width: none; min-width: 860px; }
figcaption { color: #555; font-size: .88rem; max-width: 46rem; }
.muted { color: #555; font-size: .9rem; }
"""


def page(title: str, blocks: Iterable[str]) -> str:
    """A whole page."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style></head>\n'
        f"<body>\n<h1>{escape(title)}</h1>\n{chr(10).join(blocks)}\n</body></html>\n"
    )


def heading(text: str) -> str:
    """A section's heading."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def bullets(texts: Iterable[str]) -> str:
    """A list of plain texts; nothing where there are none."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def prose(markdown: str) -> str:
    """The little Markdown that conclusions are written in: paragraphs, bullets, **bold**."""
    out: list[str] = []
    for block in markdown.split("\n\n"):
        lines = [_bold(line) for line in block.splitlines() if line]
        items = [line[2:] for line in lines if line.startswith("- ")]
        text = " ".join(line for line in lines if not line.startswith("- "))
        out += [f"<p>{text}</p>"] if text else []
        out += [f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"] if items else []
    return "\n".join(out)


def _bold(text: str) -> str:
    parts = escape(text, quote=False).split("**")
    return "".join(f"<strong>{part}</strong>" if place % 2 else part for place, part in enumerate(parts))


def table(texts: pd.DataFrame, caption: str) -> str:
    """A table of texts under its caption; it scrolls by itself where the screen is narrow."""
    if texts.empty:
        return paragraph("No run to show.", "muted")
    head = "".join(f"<th>{escape(str(column))}</th>" for column in texts.columns)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in texts.astype("str").to_numpy().tolist())
    inside = f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    return f'<div class="wide" tabindex="0"><table>{inside}</table></div>'


def _cell(text: str) -> str:
    return f'<td class="long">{escape(text)}</td>' if len(text) > 32 else f"<td>{escape(text)}</td>"


def picture(figure: Figure, caption: str, file: Path | None = None) -> str:
    """A figure as data within the page, and as a PNG file; one that only says why there is nothing to draw is text."""
    if figure.get_label() == NOTE:
        return f"<figure><figcaption>{escape(caption)}: {escape(figure.texts[0].get_text())}</figcaption></figure>"
    out = io.BytesIO()
    with warnings.catch_warnings():
        # dozens of settings in one legend leave the axes little room: the picture is crowded, not wrong
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        figure.savefig(out, format="png")
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(out.getvalue())
    data = base64.b64encode(out.getvalue()).decode()
    kind = ' class="broad" tabindex="0"' if figure.get_figwidth() > 9 else ""
    image = f'<img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
    return f"<figure{kind}>{image}<figcaption>{escape(caption)}</figcaption></figure>"
