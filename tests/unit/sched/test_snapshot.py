"""What people see of a worker, figure by figure: operators and `GET /debug/state` rely on the names."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest.mock import ANY

from jdisagg.core.requests import Role
from tests.unit.sched.engine_fake import FakeEngine, request

PROMPT = tuple(range(1, 11))


def test_a_snapshot_tells_where_every_sequence_is_and_what_it_holds() -> None:
    engine = FakeEngine(host_tokens=40)
    engine.add(replace(request("a", PROMPT, 5, deadline_s=77.0), attempt=3), request("b", (1, 2), 2))
    engine.step()
    engine.step()
    engine.add(request("c", (3,), 2))
    engine.scheduler.drain()
    snapshot = engine.scheduler.snapshot()
    assert json.loads(json.dumps(snapshot)) == snapshot
    assert snapshot == {
        "counts": {
            **{"waiting": 1, "prealloc": 0, "transfer": 0, "ready": 0},
            **{"running": 2, "publishing": 0, "parked": 0, "forking": 0},
        },
        "pages": {"total": 32, "free": 28},
        "host_tokens": {"total": 40, "used": 0},
        "prefix_cache": {"pages": 0, "digest": "0" * 32},
        "steps_in_flight": 2,
        "draining": True,
        "stats": {
            **{"preemptions": 0, "retractions": 0, "prefix_hit_tokens": 0, "prefix_query_tokens": 12},
            "refound_tokens": 0,
            **{"prefill_tokens": 12, "decode_tokens": 2, "served": 2, "forks": 0, "offloaded_tokens": 0, "restored_tokens": 0},
        },
        "sequences": [
            {
                **{"request_id": "c", "attempt": 0, "status": "waiting", "prompt_tokens": 1, "generated_tokens": 0},
                **{"computed_tokens": 0, "scheduled_tokens": 0, "in_flight_tokens": 0},
                **{"pages": 0, "held_tokens": 0, "slot": None, "deadline_s": 1e9, "waits_for": ANY},  # words: test_why
            },
            {
                **{"request_id": "a", "attempt": 3, "status": "running", "prompt_tokens": 10, "generated_tokens": 0},
                **{"computed_tokens": 0, "scheduled_tokens": 11, "in_flight_tokens": 2},
                **{"pages": 3, "held_tokens": 0, "slot": 0, "deadline_s": 77.0, "waits_for": None},
            },
            {
                **{"request_id": "b", "attempt": 0, "status": "running", "prompt_tokens": 2, "generated_tokens": 0},
                **{"computed_tokens": 0, "scheduled_tokens": 3, "in_flight_tokens": 2},
                **{"pages": 1, "held_tokens": 0, "slot": 1, "deadline_s": 1e9, "waits_for": None},
            },
        ],
    }
    engine.commit_one()
    first = engine.scheduler.snapshot()["sequences"][1]
    assert (first["generated_tokens"], first["computed_tokens"], first["in_flight_tokens"]) == (1, 10, 1)
    engine.run()
    assert engine.scheduler.snapshot()["sequences"] == []


def test_a_worker_that_does_not_drain_says_so() -> None:
    assert FakeEngine().scheduler.snapshot()["draining"] is False


def test_pinned_tokens_of_a_remote_sequence_are_shown() -> None:
    engine = FakeEngine(Role.DECODE)
    engine.add(request("local", PROMPT, 2))
    engine.run()
    engine.add(request("a", PROMPT, 2), remote=True)
    (shown,) = engine.scheduler.snapshot()["sequences"]
    assert (shown["status"], shown["held_tokens"], shown["pages"]) == ("prealloc", 8, 2)
    assert engine.scheduler.held_tokens("a") == 8
