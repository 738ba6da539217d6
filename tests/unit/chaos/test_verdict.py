"""What makes a run a failure."""

from chaos_kit.catalogue import Entry
from chaos_kit.choice import Choice
from chaos_kit.fleet import FleetPlan
from chaos_kit.outcome import Fate, Outcome, Visit
from chaos_kit.tally import Tally
from chaos_kit.verdict import Counted, Verdict

ENTRY = Entry(prompt=(1,), sampling={"temperature": 0.0, "max_tokens": 2})
RIGHT = {0: Choice([5, 7])}


def outcome(number: int, *, fate: Fate = Fate.STAYS, **fields) -> Outcome:
    visit = Visit(number=number, entry=0, fate=fate, after_s=0.0, over_http=True, stream=True, priority=0, cache_salt="")
    return Outcome(visit=visit, **{"choices": RIGHT, "usage": (1, 2), "times_sent": 1} | fields)


def judged(*outcomes: Outcome) -> Verdict:
    verdict = Verdict(seed=1, tally=Tally(exact=True))
    verdict.tally.take(outcomes, [ENTRY], [RIGHT])
    return verdict


def test_clients_that_went_away_do_not_count_and_one_failure_is_allowed_in_a_short_run() -> None:
    away = outcome(9, fate=Fate.LEAVES, went_away=True, choices={0: Choice([5])})
    one = outcome(8, error="UNAVAILABLE", choices={})
    verdict = judged(outcome(0), outcome(1), away, one)
    assert (verdict.tally.well, verdict.tally.away, verdict.tally.success) == (2, 1, 2 / 3)
    assert verdict.complaints() == []
    assert judged(outcome(0), one, one).complaints() == ["33.33% ended well, wanted 99.5%: {'UNAVAILABLE': 2}"]
    many = [outcome(number) for number in range(598)]
    assert judged(*many, one, one).complaints() == []
    assert judged(*many, one, one, one, one).complaints() != []


def test_one_wrong_token_one_hang_one_leak_or_one_death_is_too_much() -> None:
    assert judged(outcome(0, choices={0: Choice([5, 8])})).complaints() == ["1 wrong streams"]
    assert judged(outcome(0, went_away=True, choices={0: Choice([8])})).complaints() == ["1 wrong streams"]
    assert judged(outcome(0, hung=True, error="HANG")).complaints() == ["1 hung"]
    verdict = judged(outcome(0))
    verdict.leaks, verdict.deaths = ["P1: 5 pages"], ["D1, exit status 70"]
    verdict.tracebacks = ["P1: 12:00 E Traceback (most recent call last)"]
    verdict.counted = Counted(compiles={"jdisagg_compiles_after_ready_total": 2.0})
    assert verdict.complaints() == [
        "leak: P1: 5 pages",
        "died by itself: D1, exit status 70",
        "traceback in a log: P1: 12:00 E Traceback (most recent call last)",
        "compiled after READY: 2 jdisagg_compiles_after_ready_total",
    ]
    assert "RED" in verdict.text()
    told = verdict.as_json()
    assert told["complaints"] == verdict.complaints()
    assert (told["seed"], told["requests"], told["well"], told["success"]) == (1, 1, 1, 1.0)
    assert told["compiles"] == verdict.counted.compiles
    assert not {"tally", "counted"} & told.keys()


def test_a_fault_that_never_fell_is_too_much_in_a_run_that_is_long_enough() -> None:
    for requests, wanted in ((999, []), (1000, ["never fired: corrupt"])):
        verdict = judged(*(outcome(number) for number in range(requests)))
        verdict.faults, verdict.asked = {"sever": (2, 0), "corrupt": (0, 0)}, frozenset({"sever", "corrupt"})
        assert verdict.complaints() == wanted
    assert "corrupt" in verdict.text()


def test_answers_of_a_fleet_in_which_no_kv_moved_say_nothing() -> None:
    none_moved = ["no KV came from P, and 20 requests ended well"]
    for well, transfers, verified_bytes, wanted in (
        (19, True, 0.0, []), (20, True, 0.0, none_moved), (20, True, 8.0, []), (20, False, 0.0, []),
    ):  # fmt: skip
        verdict = judged(*(outcome(number) for number in range(well)))
        verdict.transfers, verdict.counted = transfers, Counted(verified_bytes=verified_bytes)
        assert verdict.complaints() == wanted
    plans = {how: FleetPlan(model="", local_prefill=how).transfers for how in ("on-failure", "never", "below-tokens=9")}
    assert plans == {"on-failure": True, "never": True, "below-tokens=9": False}
    assert not FleetPlan(model="", num_prefill=0).transfers


def test_aborts_that_nobody_hears_are_too_much() -> None:
    heard = outcome(0, fate=Fate.ABORTS, went_away=True, choices={0: Choice([5], finish="abort")})
    unheard = outcome(1, fate=Fate.ABORTS, went_away=True)
    assert judged(heard, unheard).complaints() == []
    assert judged(heard, unheard, unheard, unheard).complaints() == ["1 of 4 streams that were aborted ended by that"]


def test_a_stream_that_its_deadline_had_to_end_hung_unless_tokens_came_until_then() -> None:
    ended = {"error": "DEADLINE_EXCEEDED", "choices": {0: Choice([5])}, "seconds": 10.0}
    assert judged(outcome(0, **ended, silent_s=9.0)).complaints() == ["1 hung"]
    assert judged(outcome(0, **ended, silent_s=1.0)).complaints() == []


def test_who_diverges_has_other_tokens() -> None:
    verdict = Verdict(seed=1, tally=Tally(exact=False))
    ended = {"finish": "stop", "logprobs": [-1.0, -2.0]}
    other, like = Choice([5, 8], **ended), Choice([5, 7], **ended)  # a log probability may differ in its last bits
    verdict.tally.take([outcome(0, choices={0: other}), outcome(1, choices={0: like})], [ENTRY], [RIGHT])
    assert (verdict.tally.well, verdict.tally.diverged, verdict.complaints()) == (2, 1, [])
