"""What a process counts, as its /metrics has it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

_SAMPLE = re.compile(r"^(jdisagg_[a-z_]+)(?:\{(.*)\})? (\S+)$", re.M)


def samples(text: str) -> dict[str, float]:
    """All of jdisagg's by name and labels, `name{label="value"}`."""
    return {f"{name}{{{labels}}}" if labels else name: float(value) for name, labels, value in _SAMPLE.findall(text)}


def total(found: Mapping[str, float], name: str, **labels: str) -> float:
    """Sum of the samples of one metric whose labels match; 0 when there is none."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(value for key, value in found.items() if _name(key) == name and all(part in key for part in wanted))


def by_name(found: Mapping[str, float]) -> dict[str, float]:
    """Labels added up; 0 for names that are not there."""
    totals: dict[str, float] = defaultdict(float)
    for key, value in found.items():
        totals[_name(key)] += value
    return totals


def by_label(found: Mapping[str, float], name: str, label: str) -> dict[str, float]:
    """What one metric has counted, by the label's value."""
    counted = {key: value for key, value in found.items() if _name(key) == name and value}
    return {key.partition(f'{label}="')[2].partition('"')[0]: value for key, value in counted.items()}


def _name(key: str) -> str:
    return key.partition("{")[0]
