"""What is read from /metrics."""

from __future__ import annotations

from bench_kit.samples import by_label, by_name, samples, total

TEXT = """\
# HELP jdisagg_moved_bytes_total Bytes.
# TYPE jdisagg_moved_bytes_total counter
jdisagg_moved_bytes_total{backend="tcp",way="down"} 12.0
jdisagg_moved_bytes_total{backend="grpc",way="down"} 3.0
jdisagg_moved_bytes_total{backend="shm",way="down"} 0.0
jdisagg_moved_bytes_total_seen 100.0
jdisagg_late_seconds_bucket{le="+Inf"} 4.0
jdisagg_ready 1.0
process_open_fds 9.0
"""


def test_samples_are_those_of_a_name_and_of_labels() -> None:
    found = samples(TEXT)
    assert total(found, "jdisagg_moved_bytes_total") == 15.0
    assert total(found, "jdisagg_moved_bytes_total", backend="tcp", way="down") == 12.0
    assert total(found, "jdisagg_moved_bytes_total", way="up") == total(found, "jdisagg_moved") == 0.0
    assert total(found, "jdisagg_late_seconds_bucket", le="+Inf") == 4.0
    assert by_label(found, "jdisagg_moved_bytes_total", "backend") == {"tcp": 12.0, "grpc": 3.0}
    assert by_name(found)["jdisagg_moved_bytes_total"] == 15.0
    assert by_name(found)["jdisagg_no_such"] == 0.0
    assert found["jdisagg_ready"] == 1.0
    assert "process_open_fds" not in found
