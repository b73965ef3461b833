"""Report → one static HTML page: the tables of the Markdown and inline SVG plots. No script, nothing fetched."""

from collections.abc import Iterable, Sequence
from html import escape

from nori_cluster.bench import markdown
from nori_cluster.bench.report import Report, headline, missing_for_headline
from nori_cluster.bench.svg import Line, Mark, plot

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --faint: #d9dee4; --warn: #9c3d22; }
@media (prefers-color-scheme: dark) { :root { --ink: #dde2e8; --paper: #15181c; --faint: #363d45; --warn: #e58a6b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 75rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
.headline { border-left: 4px solid #588157; padding: .5rem 1rem; }
.invalid { border-left: 4px solid var(--warn); padding: .5rem 1rem; }
table { border-collapse: collapse; margin: .5rem 0; } th, td { text-align: left; vertical-align: top;
  padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--faint); }
td:nth-child(2) { overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
svg text { font-size: 11px; fill: var(--ink); } .grid { stroke: var(--faint); }
.mark { stroke: var(--warn); stroke-dasharray: 4 3; }
"""


def to_html(report: Report) -> str:
    title = escape(markdown.title(report))
    body = [f"<h1>{title}</h1>", verdict(report), '<div class="plots">', *plots(report), "</div>"]
    body += ["<h2>Figures</h2>", table(("figure", "value", "spread"), markdown.figure_rows(report))]
    if report.summary is not None:
        head = ("ms", "mean", "P50", "P90", "P99", "max", "samples")
        body += [table(head, markdown.latency_rows(report.summary))]
    if report.sweep is not None:
        body += ["<h2>Sweep</h2>", f"<p>{escape(markdown.sweep_text(report.sweep).replace('**', ''))}</p>"]
        body += [table(markdown.SWEEP_HEAD, markdown.sweep_rows(report.sweep))]
    body += ["<h2>Conditions</h2>", table(("condition", "value", "told by"), markdown.condition_rows(report))]
    body += ["<h2>How it was measured</h2>", table((), markdown.method_rows(report))]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def verdict(report: Report) -> str:
    missing = missing_for_headline(report)
    if not missing:
        return f'<p class="headline">{escape(headline(report))}</p>'
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in missing)
    return f'<div class="invalid"><b>No headline</b>, because:<ul>{reasons}</ul></div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_cells("th", head)] if head else []
    return "<table>" + "".join([*lines, *(_cells("td", row) for row in rows)]) + "</table>"


def _cells(tag: str, row: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"


def plots(report: Report) -> list[str]:
    """Those for which there are figures."""
    return [
        figure for figure in (_frontier(report), *_distributions(report), *_timeline(report), *_cost(report)) if figure
    ]


def _frontier(report: Report) -> str:
    """Output against TPOT P99, one dot per load of a sweep."""
    if report.sweep is None:
        return ""
    points = [point for point in report.sweep.points if point.summary.tpot and point.summary.ttft]
    points.sort(key=lambda point: point.value)
    lines = []
    for name in ("ttft", "tpot"):
        values = [getattr(point.summary, name).p99 for point in points]
        tips = [
            f"{report.sweep.by} {p.value:.4g}: {p.summary.output_tok_s:.1f} tok/s, {name.upper()} P99 {value:.1f} ms"
            for p, value in zip(points, values, strict=True)
        ]
        lines.append(Line(label=name.upper(), x=values, y=[p.summary.output_tok_s for p in points], names=tips))
    figures = [
        plot(
            f"Frontier: output against {line.label} P99",
            f"{line.label} P99, ms",
            "output tokens/s",
            [line],
            [Mark(label="SLO", x=bound)] if (bound := report.sweep.bounds.get(f"{line.label.lower()}_p99")) else [],
        )
        for line in lines
    ]
    return "".join(figures)


def _distributions(report: Report) -> list[str]:
    made = []
    for name, curve, bound in (
        ("TTFT", report.figures.ttft, report.slo.ttft),
        ("TPOT", report.figures.tpot, report.slo.tpot),
    ):
        if curve is not None:
            line = Line(label=name, x=curve.x, y=curve.y)
            marks = [Mark(label=f"SLO {bound:g} ms", x=bound)] if bound and bound < 3 * max(curve.x) else []
            made.append(plot(f"{name}: share of requests at or below", "ms", "share", [line], marks))
    return made


def _timeline(report: Report) -> list[str]:
    output, flight = report.figures.output, report.figures.in_flight
    if output is None or flight is None:
        return []
    summary = report.summary
    edges = (("window", summary.window_start), ("", summary.window_end)) if summary and summary.window_start > 0 else ()
    marks = [Mark(label=label, x=at) for label, at in edges]
    marks += [Mark(label="", x=at) for at in report.figures.failed_at[:20]]
    lines = (
        ("Output over the run", "tokens/s", Line(label="output", x=output.x, y=output.y)),
        ("Requests in flight", "requests", Line(label="in flight", x=flight.x, y=flight.y)),
    )
    return [plot(title, "seconds", unit, [line], marks) for title, unit, line in lines]


def _cost(report: Report) -> list[str]:
    """Cost per million output tokens against the latency a user sees, over a sweep; one dot otherwise."""
    if report.cost is None:
        return []
    hour, currency = report.cost.per_hour, report.cost.currency
    points = report.sweep.points if report.sweep else []
    shown = [(p.value, p.summary) for p in points] or ([(0.0, report.summary)] if report.summary else [])
    dots = [
        (summary.tpot.p50, hour / (summary.output_tok_s * 3600) * 1e6, value)
        for value, summary in sorted(shown, key=lambda pair: pair[0])
        if summary is not None and summary.tpot is not None and summary.output_tok_s > 0
    ]
    if not dots:
        return []
    x, y, values = zip(*dots, strict=True)
    tips = [f"{value:.4g}: {price:.4g} {currency}" for value, price in zip(values, y, strict=True)]
    line = Line(label="cost", x=x, y=y, names=tips)
    return [plot("Cost of a million output tokens", "TPOT P50, ms", currency, [line])]
