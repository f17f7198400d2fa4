"""Bench page: what ways of batching came to, as one HTML file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from paged_backend.lab.bench import Bench, Measured
from paged_backend.lab.bench_report import definitions, latencies, rows
from paged_backend.lab.run import Run

_COLOURS = ("#8c6bb1", "#4d8fd1", "#c97b2d", "#b5a12b", "#2a9d6f", "#c2577a")
_WIDTH, _LEFT, _TOP, _BOTTOM = 860, 54, 8, 26
_STYLE = """
:root { --ink: #1d2430; --soft: #667; --line: #d8dce3; --paper: #fff; --wait: #d5d9e2 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaee; --soft: #9aa3b2; --line: #3a4250; --paper: #14181f; --wait: #3a4250 }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 900px; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem } p { color: var(--soft); margin: .3rem 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem }
.wide { overflow-x: auto }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th:first-child, td:first-child { text-align: left } td small { color: var(--soft) }
svg { width: 100%; height: auto; display: block } svg text { fill: var(--soft); font: 11px system-ui, sans-serif }
svg .axis { stroke: var(--line) } svg .wait { fill: var(--wait) }
.key span { display: inline-block; margin-right: 1.2rem } .key i { display: inline-block; width: .8rem; height: .8rem;
  border-radius: 2px; margin-right: .4rem; vertical-align: -1px }
"""


def page(bench: Bench, title: str, about: Sequence[str]) -> str:
    """The whole file: the numbers, each request as a bar over time, latencies and the use of memory.

    about: lines that say of what and where this was measured.
    """
    colours = {id(measured): _COLOURS[n % len(_COLOURS)] for n, measured in enumerate(bench.measured)}
    end = max(measured.arriving.seconds for measured in bench.measured)
    most = max(moment.allocated for measured in bench.measured for moment in measured.saturated.memory)
    parts = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(line)}</p>" for line in about), _table(bench)]
    meaning = definitions(bench).replace("In brackets", "In small print")
    parts += [f"<p>{escape(line)}</p>" for line in meaning.splitlines()]
    parts.append("<h2>Latency</h2><p>The share of requests that were answered within so many seconds.</p>")
    parts.append(_key((measured.mode.text, colours[id(measured)]) for measured in bench.measured))
    parts.append(_curves([(_shares(latencies(m.arriving)), colours[id(m)]) for m in bench.measured], "s"))
    for measured in bench.measured:
        colour = colours[id(measured)]
        parts.append(f"<h2>{escape(measured.mode.text)}</h2>")
        parts.append("<p>Each request as it arrived, from top to bottom: waiting, then until its answer.</p>")
        parts.append(_key([("waits for its first token", "var(--wait)"), ("until its answer", colour)]))
        parts.append(_timeline(measured, end, colour))
        parts.append("<p>KV memory, all requests at once: allocated, and of it filled.</p>")
        parts.append(_memory(measured.saturated, most, colour))
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _table(bench: Bench) -> str:
    head = "".join(f"<th>{escape(measured.mode.text)}</th>" for measured in bench.measured)
    lines = []
    for text, cells in rows(bench):
        shown = "".join(
            f"<td>{escape(cell)}{f' <small>{gain:.1f}x</small>' if gain is not None else ''}</td>"
            for cell, gain in cells
        )
        lines.append(f"<tr><td>{escape(text)}</td>{shown}</tr>")
    return f'<div class="wide"><table><tr><th></th>{head}</tr>\n' + "\n".join(lines) + "</table></div>"


def _key(entries: Iterable[tuple[str, str]]) -> str:
    spans = (f'<span><i style="background:{colour}"></i>{escape(text)}</span>' for text, colour in entries)
    return f'<p class="key">{"".join(spans)}</p>'


def _timeline(measured: Measured, end: float, colour: str) -> str:
    outcomes = measured.arriving.outcomes
    row = max(2.0, min(12.0, 420 / len(outcomes)))
    scale = _Scale(end)
    bars = []
    for n, outcome in enumerate(outcomes):
        assert outcome.first_token is not None
        assert outcome.finished is not None
        what = (
            f"request {n}: {outcome.num_prompt_tokens} prompt tokens, {outcome.num_output_tokens} generated, due at "
            f"{outcome.arrival:.2f} s, first token at {outcome.first_token:.2f} s, answered at {outcome.finished:.2f} s"
        )
        for start, stop, look in (
            (outcome.arrival, outcome.first_token, 'class="wait"'),
            (outcome.first_token, outcome.finished, f'fill="{colour}"'),
        ):
            x, width = scale.x(start), max(0.5, scale.x(stop) - scale.x(start))
            bars.append(
                f'<rect x="{x:.1f}" y="{n * row:.1f}" width="{width:.1f}" height="{row * 0.8:.1f}" {look}>'
                f"<title>{escape(what)}</title></rect>"
            )
    return _svg(row * len(outcomes), scale, "".join(bars), "s")


def _memory(run: Run, most: int, colour: str, height: float = 110.0) -> str:
    """Areas of what is allocated and filled; the height stands for ``most`` tokens, the same for all modes."""
    scale = _Scale(max(run.seconds, run.memory[-1].time))

    def area(values: Sequence[float], opacity: float) -> str:
        points = [f"{scale.x(0):.1f},{height:.1f}"]
        before = height
        for moment, value in zip(run.memory, values, strict=True):
            x, y = scale.x(moment.time), height * (1 - value / most)
            points += [f"{x:.1f},{before:.1f}", f"{x:.1f},{y:.1f}"]
            before = y
        points.append(f"{scale.x(scale.end):.1f},{height:.1f}")
        return f'<polygon points="{" ".join(points)}" fill="{colour}" opacity="{opacity}"/>'

    shown = area([m.allocated for m in run.memory], 0.3) + area([m.filled for m in run.memory], 0.9)
    return _svg(height, scale, shown + f'<text x="2" y="10">{most:,}</text><text x="2" y="22">tokens</text>', "s")


def _shares(seconds: Sequence[float]) -> list[tuple[float, float]]:
    ordered = sorted(seconds)
    return [(value, (n + 1) / len(ordered)) for n, value in enumerate(ordered)]


def _curves(curves: Sequence[tuple[Sequence[tuple[float, float]], str]], unit: str, height: float = 220.0) -> str:
    scale = _Scale(max(points[-1][0] for points, _ in curves))
    shown = []
    for points, colour in curves:
        path, y = [f"M{scale.x(0):.1f},{height:.1f}"], height
        for value, share in points:
            path.append(f"L{scale.x(value):.1f},{y:.1f}")
            y = height * (1 - share)
            path.append(f"L{scale.x(value):.1f},{y:.1f}")
        path.append(f"L{scale.x(scale.end):.1f},{y:.1f}")
        shown.append(f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="2"/>')
    marks = ""
    for share in (0.5, 0.99):
        y = height * (1 - share)
        marks += f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        marks += f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>'
    return _svg(height, scale, marks + "".join(shown), unit)


class _Scale:
    """Seconds as pixels from the left, and where marks go."""

    def __init__(self, end: float) -> None:
        step = 10 ** math.floor(math.log10(end or 1))
        self.step = next(step * part for part in (0.1, 0.2, 0.5, 1, 2) if end <= 10 * step * part)
        self.end = end or 1.0

    def x(self, seconds: float) -> float:
        return _LEFT + (_WIDTH - _LEFT) * seconds / self.end

    def marks(self) -> list[float]:
        return [n * self.step for n in range(int(self.end / self.step) + 1)]


def _svg(height: float, scale: _Scale, inner: str, unit: str) -> str:
    marks = "".join(
        f'<line class="axis" x1="{scale.x(mark):.1f}" x2="{scale.x(mark):.1f}" y1="0" y2="{height + 4:.1f}"/>'
        f'<text x="{scale.x(mark):.1f}" y="{height + 17:.1f}" text-anchor="middle">{mark:g} {unit}</text>'
        for mark in scale.marks()
    )
    box = f"0 {-_TOP} {_WIDTH + 20} {height + _TOP + _BOTTOM:.0f}"
    return f'<svg viewBox="{box}" role="img">{marks}{inner}</svg>'
