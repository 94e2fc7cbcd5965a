"""Sentences and numbers that all writers of a report share.

What they show is made safe by ``smoke.output.printable``; escaping of markup is each writer's own.
"""

from __future__ import annotations

import math

from smoke.report.contract import Report

HOW = {
    "native": "made by Transformer Engine on hardware that has the format",
    "emulated": "quantized and dequantized by this project, with exact products; not Transformer Engine's kernels",
    "mixed": "some products made by Transformer Engine, some emulated",
    "bf16": "nothing is quantized",
}
"""How the numbers of a run were made, in words."""


def number(value: float | None, digits: int = 1) -> str:
    """With thousands separators; ``-`` where nothing was measured."""
    if value is None:
        return "-"
    return f"{value:,.{digits}f}" if math.isfinite(value) else str(value)


def how(report: Report) -> str:
    """One sentence on how the numbers were made."""
    if report.numerics is None:
        return "Nothing was run, so there are no numbers."
    sentence = f"Numerics {report.numerics}: {HOW[report.numerics]}."
    if report.times_of == "emulation":
        sentence += " Times are those of the emulation and say nothing about the hardware."
    return sentence


def summary_pairs(report: Report) -> list[tuple[str, str]]:
    """Label and value of the main numbers; times carry what they are times of."""
    s, of = report.summary, f" ({report.times_of})" if report.times_of else ""
    pairs = [
        ("steps", f"{s.steps} with {s.tokens:,} label tokens"),
        ("loss", f"{number(s.loss_first, 4)} first, {number(s.loss_last, 4)} last (nats per token)"),
    ]
    if s.step_time_ms_p50 is not None:
        step = f"{number(s.step_time_ms_p50)} ms p50, {number(s.step_time_ms_p95)} ms p95"
        pairs.append((f"step time{of}", step))
        halves = f"{number(s.forward_ms_p50)} ms forward, {number(s.backward_ms_p50)} ms backward"
        pairs.append((f"of it, p50{of}", halves))
        pairs.append((f"throughput{of}", f"{number(s.tokens_per_s, 0)} tokens/s"))
    if s.peak_gib is not None:
        pairs.append(("peak memory", f"{number(s.peak_gib, 2)} GiB"))
    if s.held_mib is not None:
        pairs.append(("held for backward", f"{number(s.held_mib, 2)} MiB"))
    return pairs
