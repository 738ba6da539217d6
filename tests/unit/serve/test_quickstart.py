"""What the quickstart says of the fleet that it started."""

from __future__ import annotations

from quickstart import processes

from jdisagg.serve.ready import Ready


def test_the_quickstart_tells_where_the_metrics_of_every_process_are() -> None:
    children = (
        {"role": "router", "pid": 7, "http": "127.0.0.1:8000", "grpc": "127.0.0.1:9000"},
        {"role": "prefill", "pid": 12345, "http": "127.0.0.1:40001", "grpc": "127.0.0.1:40002"},
    )
    ready = Ready(role="local", http="127.0.0.1:8000", grpc="127.0.0.1:9000", model="demo", workers=children)
    assert processes(ready) == [
        "  router  pid 7       grpc 127.0.0.1:9000   http://127.0.0.1:8000/metrics",
        " prefill  pid 12345   grpc 127.0.0.1:40002  http://127.0.0.1:40001/metrics",
    ]
