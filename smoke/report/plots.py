"""Figures of report.html as plain Plotly dictionaries: loss curves, gaps to the BF16 twin, map of gradient errors.

Pure functions of the record. Plotly reads a few HTML tags in labels, so every name is escaped for HTML here; escaping
for the page around it is ``smoke.report.html``'s. A value that is not finite is a gap in a line and has the brightest
colour in the map.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from typing import Any

from smoke.output import printable
from smoke.record import GradientRow, Record

Figure = dict[str, Any]
RUN, TWIN, FLOOR, OTHER = "#b5179e", "#1d4e89", "#8a94a6", "#c9a227"
LEAST_ERROR = 1e-9
"""Errors below this, zero among them, share the darkest colour."""
LAYOUT: Figure = {
    "margin": {"l": 60, "r": 16, "t": 16, "b": 48},
    "paper_bgcolor": "white",
    "plot_bgcolor": "white",
    "font": {"family": "system-ui, sans-serif", "size": 13},
}
GRID = {"gridcolor": "#e3e6eb", "zerolinecolor": "#e3e6eb", "automargin": True}


def figures(record: Record) -> dict[str, Figure]:
    """Figures that the record has rows for, by the id of their place in the page."""
    made = {"loss": loss_curves(record), "gap": loss_gaps(record), "gradients": gradient_map(record.gradients)}
    return {name: figure for name, figure in made.items() if figure is not None}


def loss_curves(record: Record) -> Figure | None:
    """Loss by step of the run, of its BF16 twin, of the perturbed twins, and of another seed (hidden at first)."""
    curves = record.curves
    run = curves.run or tuple(row.loss for row in record.steps)
    if not run:
        return None
    data = _floor_lines("BF16 twin, perturbed", curves.perturbed, mode="lines")
    if curves.twin:
        data.append(_line("BF16 twin", curves.twin, TWIN, dash="dash"))
    if curves.other_seed:
        data.append(_line("another seed", curves.other_seed, OTHER, dash="dot", visible="legendonly"))
    return {"data": [*data, _line("run", run, RUN, width=3)], "layout": _xy("step", "loss (nats per token)")}


def loss_gaps(record: Record) -> Figure | None:
    """Distance to the BF16 twin by step: the run's, and the noise floor's. Zero is a gap: the axis is logarithmic."""
    curves = record.curves
    if not curves.run or not curves.twin:
        return None
    floors = [_gap(losses, curves.twin) for losses in curves.perturbed]
    data = _floor_lines("noise floor", floors, mode="lines+markers")
    data.append(_line("run", _gap(curves.run, curves.twin), RUN, width=3, mode="lines+markers"))
    layout = _xy("step", "distance to the BF16 twin (nats)")
    layout["yaxis"] |= {"type": "log", "exponentformat": "power"}
    return {"data": data, "layout": layout}


def gradient_map(rows: Sequence[GradientRow]) -> Figure | None:
    """Worst relative error by layer (columns) and parameter (rows) over steps, slices and experts, routing replayed."""
    worst: dict[tuple[str, str], GradientRow] = {}
    for row in rows:
        if row.routing != "replayed":
            continue
        place = split_name(row.parameter)
        if place not in worst or _order(row) > _order(worst[place]):
            worst[place] = row
    if not worst:
        return None
    layers = sorted({layer for layer, _ in worst}, key=_layer_order)
    names = list(dict.fromkeys(name for _, name in worst))
    cells = [[worst.get((layer, name)) for layer in layers] for name in names]
    heatmap = {
        "type": "heatmap",
        "x": [_label(layer) for layer in layers],
        "y": [_label(name) for name in names],
        "z": [[_colour(cell) for cell in line] for line in cells],
        "text": [[_hover(cell) for cell in line] for line in cells],
        "hovertemplate": "%{text}<extra></extra>",
        "hoverongaps": False,
        "colorscale": "Cividis",
        "colorbar": {"title": {"text": "relative error"}, "tickprefix": "1e", "thickness": 14, "dtick": 1},
        "xgap": 2,
        "ygap": 2,
    }
    axis = {"type": "category", "automargin": True, "showgrid": False}
    layout = LAYOUT | {"xaxis": axis | {"side": "top"}, "yaxis": axis | {"autorange": "reversed"}}
    margin = LAYOUT["margin"] | {"t": 64}
    return {"data": [heatmap], "layout": layout | {"height": 140 + 22 * len(names), "margin": margin}}


def split_name(parameter: str) -> tuple[str, str]:
    """Layer and parameter within it; the experts' numbered weights count as one parameter."""
    parameter = re.sub(r"\d+$", "*", parameter)
    numbered = re.match(r"(?:.*\.)?(\w+\.\d+)\.(.+)$", re.sub(r"^model\.", "", parameter))
    if numbered:
        return numbered[1].replace(".", " "), numbered[2]
    extra = re.match(r"(mtp)\.(?:mtp_model_layer\.)?(.+)$", parameter)
    return (extra[1], extra[2]) if extra else ("no layer", parameter)


def _layer_order(layer: str) -> tuple[int, str, int]:
    word, _, index = layer.rpartition(" ")
    return (0, word, int(index)) if index.isdigit() else (1, layer, 0)


def _line(name: str, losses: Sequence[float | None], colour: str, *, width: int = 2, dash: str = "solid", **more: Any):
    y = [loss if loss is not None and math.isfinite(loss) else None for loss in losses]
    line = {"color": colour, "width": width, "dash": dash}
    return {"type": "scatter", "mode": "lines", "name": name, "x": list(range(len(y))), "y": y, "line": line} | more


def _floor_lines(name: str, draws: Sequence[Sequence[float | None]], mode: str) -> list[Figure]:
    """One thin line for each draw, one entry in the legend for all."""
    return [
        _line(f"{name} ({i})", losses, FLOOR, width=1, mode=mode, legendgroup=name, showlegend=i == 1)
        for i, losses in enumerate(draws, 1)
    ]


def _xy(x: str, y: str) -> Figure:
    legend = {"orientation": "h", "y": -0.25, "yanchor": "top"}
    titles = {"xaxis": GRID | {"title": {"text": x}}, "yaxis": GRID | {"title": {"text": y}}}
    return LAYOUT | titles | {"height": 420, "legend": legend, "hovermode": "x unified"}


def _gap(left: Sequence[float], right: Sequence[float]) -> list[float | None]:
    return [abs(a - b) or None for a, b in zip(left, right, strict=False)]


def _order(row: GradientRow) -> float:
    return row.relative_error if math.isfinite(row.relative_error) else math.inf


def _colour(row: GradientRow | None) -> float | None:
    if row is None:
        return None
    return math.log10(min(max(_order(row), LEAST_ERROR), 10.0))


def _hover(row: GradientRow | None) -> str:
    if row is None:
        return ""
    part = f", {_label(row.slice)}" if row.slice else ""
    kept = "" if row.quantized else "<br>kept in BF16"
    return (
        f"{_label(row.parameter)}{part}<br>relative error {row.relative_error:.3g}, cosine {row.cosine:.6f}"
        f"<br>worst at step {row.step}{kept}"
    )


def _label(text: str) -> str:
    return html.escape(printable(text), quote=False)
