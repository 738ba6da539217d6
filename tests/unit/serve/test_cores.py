"""What a container's cgroup says of cores, in the files of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from jdisagg.serve.cores import cpu_quota


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": ""}, None),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "400000\n"}, None),
    ],
)
def test_a_quota_is_read_where_there_is_one(tmp_path: Path, files: dict[str, str], wanted: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == wanted
