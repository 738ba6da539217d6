"""What a real server tells of one request: its log line, its metrics, and its replayed life."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.conftest import Start
from tests.e2e.processes import wait_until

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PHASES = ("queue", "prefill", "transfer", "decode")


@pytest.mark.covers("V39")
def test_a_request_is_told_by_log_metrics_and_replay(start: Start, exact_flags: tuple[str, ...], tmp_path: Path) -> None:
    schedule = tmp_path / "schedule.jsonl"
    flags = ("--role", "unified", *exact_flags, "--schedule-log", str(schedule), "--slow-request-s", "0")
    server = start("told", *flags).wait_ready()
    body = {"prompt": list(range(30, 70)), "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    headers = {"Content-Type": "application/json", "traceparent": TRACE}
    asked = urllib.request.Request(server.http + "/v1/completions", data=json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(asked, timeout=60) as response:
        answer = json.loads(response.read())
    name = answer["id"] + "/0"
    told = f"request {name} (traceparent {TRACE}): length, 8 tokens in"
    wait_until(lambda: told in server.log_since_ready(), 30, "the log tells of it", server.log_since_ready)
    wait_until(lambda: not server.state()["requests"], 30, "nothing is known of it any more", server.state)
    whole_s = server.metric("jdisagg_request_seconds_sum")
    assert 0 < whole_s < 60
    assert sum(server.metric(f"jdisagg_request_{phase}_seconds_sum") for phase in PHASES) == pytest.approx(whole_s)
    assert server.metric("jdisagg_tick_seconds_total", stage="wait") > 0
    assert server.stop() == 0
    command = [sys.executable, "-m", "jdisagg.replay", str(schedule), "--why"]
    told = subprocess.run([*command, name], capture_output=True, text=True, timeout=150, check=True).stdout
    assert told.startswith(f"request {name}: 40 prompt tokens, at most 8 new; added at ")
    assert f"trace {TRACE}" in told
    assert "finished: length, 8 tokens; queue " in told
    assert "all the same" in told
    by_answer = subprocess.run([*command, answer["id"]], capture_output=True, text=True, timeout=150, check=True).stdout
    assert f"request {name}: 40 prompt tokens" in by_answer, "the id that the client knows"
    unknown = subprocess.run([*command, answer["id"] + "x"], capture_output=True, text=True, timeout=150, check=False)
    assert unknown.returncode == 2
    assert name in unknown.stderr
