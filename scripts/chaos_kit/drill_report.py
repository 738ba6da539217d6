"""The drills' results as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chaos_kit.act import Blow, Victim
from chaos_kit.cell import Cell
from chaos_kit.host_drill import Survived
from chaos_kit.stages import Stage

Row = dict[str, Any]
DETAILS = 4  # of a cut


def cell_line(cell: Cell) -> str:
    """One cell in one line."""
    parts = [
        f"{'ok ' if cell.ok else 'BAD'} {cell.blow} of {cell.victim} ({cell.struck or '-'}), {cell.stage}: {_short(cell)}",
        f"KV from > ended on: {cell.ending.went_on or '-'}",
        f"seen '{cell.seen}' at try {cell.tries}",
        f"others {', '.join(f'{count} {fate}' for fate, count in cell.others.items()) or '-'}",
        f"left: {', '.join(cell.leaks) or 'nothing'} after {cell.at_rest_s:.1f} s",
    ]
    parts += [f"asked again: {cell.again}"] if cell.again else []
    return "; ".join(parts + ([cell.ending.detail] if cell.ending.detail else []))


def cell_table(cells: Sequence[Cell]) -> str:
    """States down, blows across."""
    columns = [(victim, blow) for victim in Victim for blow in Blow]
    found = {(cell.stage, cell.victim, cell.blow): cell for cell in cells}
    rows = [["", *(f"{blow.value} of {victim.value}" for victim, blow in columns)]]
    for stage in Stage:
        mine = [found.get((stage.value, victim.value, blow.value)) for victim, blow in columns]
        if any(mine):
            rows.append([stage.value, *("-" if cell is None else _short(cell) for cell in mine)])
    ok = sum(cell.ok for cell in cells)
    return f"{_aligned(rows)}\n{ok} of {len(cells)} cells as they must be"


def gap_table(rows: Sequence[Row]) -> str:
    """One line per kind of trouble; milliseconds."""
    head = ["ms", "gap p50", "p99", "max", "n", "re-prefill p50", "p99", "target", "", "bystander ITL p99", "calm", "ratio", ""]
    lines = [head]
    for row in rows:
        gap, prefill = row["gap_ms"], row["re_prefill_ms"]
        lines.append(
            [f"{row['trouble']} x{row['strikes']}"]
            + [f"{gap[name]:.0f}" for name in ("p50", "p99", "max", "count")]
            + [f"{prefill['p50']:.0f}", f"{prefill['p99']:.0f}", f"{row['gap_target_ms']:.0f}", _word(row["gap_ok"])]
            + [f"{row['bystander_itl_ms']['p99']:.0f}", f"{row['undisturbed_itl_ms']['p99']:.0f}"]
            + [f"{row['itl_p99_ratio']:.2f}", _word(row["itl_ok"])]
        )
    told = [
        f"{row['trouble']}: streams {row['became']}, rungs {row['rungs']}, {row['strikes_that_hit_no_stream']} strikes hit no "
        f"stream, left: {', '.join(row['leaks']) or 'nothing'}"
        for row in rows
    ]
    return "\n".join([_aligned(lines), *told])


def cut_line(outcome: Survived) -> str:
    """One cut of the network in one line, and what was not exact in lines of their own."""
    head = "ok " if outcome.ok else "BAD"
    parts = [
        f"{head} {outcome.cut}: streams {outcome.became}, slowest {outcome.slowest_s:.1f} s",
        f"whole {outcome.whole_s:.1f} s after it healed" if not outcome.missing else f"not whole: {outcome.missing}",
        f"steps {outcome.rungs}",
    ]
    return "\n         ".join(["; ".join(parts), *outcome.details[:DETAILS]])


def cut_table(outcomes: Sequence[Survived], left: str, calm_s: float) -> str:
    """One line per cut; `calm_s`: the slowest answer that nothing disturbed."""
    lines = [["", "streams", "exact", "wrong", "failed by name", "slowest s", "whole after s", "", "steps taken"]]
    for one in outcomes:
        steps = ", ".join(f"{count} {rung}" for rung, count in sorted(one.rungs.items()))
        failed = f"{one.named} (may)" if one.may_fail else str(one.named)
        whole = "not" if one.missing else f"{one.whole_s:.1f}"
        counts = map(str, (one.num_streams, one.num_exact, one.num_bad))
        lines.append([one.cut, *counts, failed, f"{one.slowest_s:.1f}", whole, "ok" if one.ok else "BAD", steps])
    ok, ended = sum(one.ok for one in outcomes), sorted({name for one in outcomes for name in one.ended})
    fates = f"processes that ended: {', '.join(ended) or 'none'}; left: {left or 'nothing'}"
    told = f"{ok} of {len(outcomes)} cuts as they must be; {fates}; slowest undisturbed: {calm_s:.1f} s"
    return f"{_aligned(lines)}\n{told}"


def machine_line(machine: Row) -> str:
    """What else ran."""
    return f"{machine['cores']} cores, load {machine['load']}, busy besides: {', '.join(machine['busy']) or 'nothing'}"


def _short(cell: Cell) -> str:
    ending = cell.ending
    gap = f" {ending.gap_s * 1e3:.0f} ms" if ending.gap_s is not None else ""
    return f"{ending.became}{gap}" + ("" if cell.ok else " (!)")


def _word(ok: bool) -> str:
    return "ok" if ok else "MISSED"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(part.ljust(width) for part, width in zip(row, widths, strict=True)).rstrip() for row in rows)
