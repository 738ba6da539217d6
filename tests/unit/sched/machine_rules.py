"""One worker and its clients as a hypothesis state machine.

After every rule: pages and slots balance, statuses went along the table, the strict device found nothing wrong, every page and
host copy holds what the model's definition says, and so does what each client has seen. At the end everything is served,
nothing is left, and the schedule log replays to the same plans.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import EngineRequest, FinishReason, Grammar, GrammarKind, Role
from jdisagg.replay import replay
from tests.unit.sched.engine_fake import FakeEngine, expected, request
from tests.unit.sched.machine_truth import Truth

MAX_IN_FLIGHT = 2
MAX_LIVE = 10  # then nobody comes: more wait longer and see no more
MAX_MODEL_LEN = 40
MAX_TICKS = 2000  # until all are served
PAGE_SIZE = 4
PROMPTS = st.one_of(
    st.lists(st.integers(0, 30), min_size=1, max_size=14).map(tuple),
    st.integers(1, 20).map(lambda n: tuple(range(1, n + 1))),  # share prefixes
)
EDGES = st.builds(  # end at a page's edge or beside it
    lambda pages, more, first: tuple(range(first, first + pages * PAGE_SIZE + more)),
    st.integers(1, 4),
    st.sampled_from([-1, 0, 0, 1, 2]),
    st.integers(1, 2),
)
NUM_CHOICES = st.sampled_from([2, 3, 5, 8])
MAX_TOKENS = st.sampled_from([1, 2, 5, 9, 20])
MOSTLY = st.sampled_from([True, True, False])
SALTS = st.sampled_from(["", "", "tenant"])


GRAMMAR = Grammar(GrammarKind.REGEX, "what the device allows")  # one that nothing looks into here


class WorkerMachine(RuleBasedStateMachine):
    """One worker of `role` and its clients."""

    role = Role.UNIFIED
    num_rules = 0  # of all histories of this class

    @initialize(
        num_pages=st.one_of(st.integers(3, 8), st.integers(8, 20)),
        max_num_seqs=st.sampled_from([1, 2, 3, 4, 8]),
        budget=st.integers(4, 12),
        threshold=st.sampled_from([0, 3]),
        reserve=st.sampled_from([0, 0, 0, 5]),
        policy=st.sampled_from(["fcfs", "priority", "prefill-first"]),
        steps=st.sampled_from([1, 1, 3]),
        host_tokens=st.sampled_from([0, 12, 100, 100, 100]),
        max_bypass=st.sampled_from([0, 1, 16]),
        safety_margin=st.sampled_from([0.0, 0.0, 0.0, 0.3]),
        max_num_kv_read_tokens=st.sampled_from([0, 0, 0, 50]),
        caching=st.booleans(),
        local_prefill=st.booleans(),
    )
    def start(
        self, *, max_num_seqs: int, budget: int, threshold: int, reserve: int, policy: str, steps: int, **options: Any
    ) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.log = Path(self.directory.name) / "schedule.jsonl"
        self.engine = FakeEngine(
            self.role,
            page_size=PAGE_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(budget, max_num_seqs),
            long_prefill_token_threshold=threshold,
            reserved_decode_tokens=reserve,
            scheduling_policy=policy,
            num_scheduler_steps=steps,
            schedule_log=str(self.log),
            **options,
        )
        self.truth = Truth(self.engine)
        self.requests: dict[str, EngineRequest] = {}

    # --- clients

    @precondition(lambda self: self._has_few())
    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 14),
        ignore_eos=st.booleans(),
        num_resumed=st.integers(0, 3),
        priority=st.integers(0, 2),
        deadline_s=st.sampled_from([1e9, 1e9, 2.0]),
        remote=st.booleans(),
        is_open=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        logprobs=st.sampled_from([None, None, 0]),
        grammar=st.sampled_from([None, None, GRAMMAR]),
        salt=SALTS,
        fits=st.sampled_from([True, True, True, False]),
    )
    def add_one(self, prompt: tuple[int, ...], max_tokens: int, fits: bool, **options: Any) -> None:
        """One request; many would not fit into a small pool: some of those are refused, the others cut down to its size."""
        if fits:
            prompt, max_tokens = self._cut(prompt, max_tokens)
        self.add(prompt=prompt, max_tokens=max_tokens, **options)

    def add(
        self,
        *,
        prompt: tuple[int, ...],
        max_tokens: int,
        ignore_eos: bool = True,
        num_resumed: int = 0,
        deadline_s: float = 1e9,
        remote: bool,
        is_open: bool = True,
        **rest: Any,
    ) -> None:
        name = f"r{len(self.requests)}"
        resumed = tuple(expected(prompt, min(num_resumed, max_tokens - 1), ignore_eos=ignore_eos))
        deadline_s += self.engine.now_s
        new = request(name, prompt, max_tokens, ignore_eos=ignore_eos, generated=resumed, deadline_s=deadline_s, **rest)
        remote = remote and self.role is Role.DECODE
        try:
            self.engine.add(new, remote=remote, is_open=is_open)
        except InvalidRequest:
            return
        self.requests[name] = new
        self.truth.add(new)
        self.accepted(new, remote)

    def accepted(self, asked: EngineRequest, remote: bool) -> None:
        """A request has come in."""

    @precondition(lambda self: self._has_few())
    @rule(
        prompt=EDGES,
        n=NUM_CHOICES,
        max_tokens=MAX_TOKENS,
        remote=MOSTLY,
        salt=SALTS,
        num_resumed=st.sampled_from([0, 0, 0, 2]),
        has_own_name=st.booleans(),
    )
    def add_choices(
        self, prompt: tuple[int, ...], n: int, max_tokens: int, num_resumed: int, has_own_name: bool, **rest: Any
    ) -> None:
        """Choices of one request: they may share its prompt's KV, and get what they would get alone. They fit into the pool,
        often just so. The last of a replayed group has begun already. Clients name the groups, and may all take one name."""
        prompt, max_tokens = self._cut(prompt, max_tokens)
        group = f"g{len(self.requests)}" if has_own_name else "g"
        for number in range(n):
            done = num_resumed if number == n - 1 else 0
            self.add(prompt=prompt, max_tokens=max_tokens, num_resumed=done, fork_group=group, **rest)

    @rule(prompt=EDGES, n=NUM_CHOICES, max_tokens=MAX_TOKENS, remote=MOSTLY, num_turns=st.integers(0, 4))
    def choices_alone(self, num_turns: int, **group: Any) -> None:
        """Choices of one request have the worker to themselves, and get so far."""
        self.finish()
        self.add_choices(num_resumed=0, has_own_name=True, salt="", **group)
        for _ in range(num_turns):
            self.serve_once()

    def _has_few(self) -> bool:
        return len(self.engine.scheduler.table.live) < MAX_LIVE

    def _cut(self, prompt: tuple[int, ...], max_tokens: int) -> tuple[tuple[int, ...], int]:
        room = self.engine.scheduler.num_pages * PAGE_SIZE
        return prompt[:room], min(max_tokens, room - len(prompt[:room]) + 1)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Whom nobody waits for any more; the latest ones also when they are over."""
        live = self.engine.scheduler.table.live
        name = data.draw(st.sampled_from(sorted({*live, *list(self.requests)[-2:]})))
        self.engine.drop(name)

    # --- steps

    @precondition(lambda self: len(self.engine.in_flight) < MAX_IN_FLIGHT)
    @rule()
    def step(self) -> None:
        self.engine.step()
        self.stepped()

    def stepped(self) -> None:
        """A plan was made."""

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def commit(self) -> None:
        self.engine.commit_one()

    @rule(count=st.integers(1, 6))
    def run(self, count: int) -> None:
        for _ in range(count):
            if len(self.engine.in_flight) < MAX_IN_FLIGHT:
                self.step()
            self.engine.commit_one()

    @precondition(lambda self: self.engine.device.slots)
    @rule(data=st.data())
    def numbers_go_wrong(self, data: st.DataObject) -> None:
        """The next token of a slot is NaN: its request fails alone."""
        self.engine.device.bad.add(data.draw(st.sampled_from(sorted(self.engine.device.slots))))

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.engine.now_s += seconds
        self.engine.collect(self.engine.scheduler.expire(self.engine.now_s))

    @precondition(lambda self: any(s.wait.was_preempted and s.slot is None for s in self.engine.scheduler.table.live.values()))
    @rule()
    def time_passes_while_somebody_waits_for_lost_pages(self) -> None:
        """The deadlines of some pass: those of the others do not."""
        self.time_passes(seconds=3.0)

    @rule()
    def forget_prefixes(self) -> None:
        self.engine.scheduler.reset_prefix_cache()

    # --- after every rule, and at the end

    @invariant()
    def nothing_is_wrong(self) -> None:
        if hasattr(self, "engine"):
            type(self).num_rules += 1
            self.engine.scheduler.check()
            self.truth.check()
            assert self.engine.scheduler.counts()["running"] <= self.engine.config.max_num_seqs

    def teardown(self) -> None:
        """Everybody is served; then the log is replayed. After a failure there is nothing to add to it."""
        if not hasattr(self, "engine"):
            return
        with self.directory:
            if not isinstance(sys.exc_info()[1], AssertionError):
                self._serve_rest()
            self.engine.scheduler.close_log()

    def _serve_rest(self) -> None:
        self.finish()
        self.truth.check()
        self.engine.run(max_ticks=1)
        for name, asked in self.requests.items():
            self._check_end(name, asked)
        self.engine.scheduler.close_log()
        with self.log.open(encoding="utf-8") as lines:
            report = replay(lines)
        assert report.difference is None
        assert report.num_plans >= len(self.engine.plans)

    def finish(self) -> None:
        """Everybody is served."""
        for _ in range(MAX_TICKS):
            if self.engine.scheduler.is_idle() and not self.engine.in_flight:
                return
            self.serve_once()

    def serve_once(self) -> None:
        """Everybody does what he can, once."""
        if len(self.engine.in_flight) < MAX_IN_FLIGHT:
            self.step()
        self.engine.commit_one()
        self.engine.collect(self.engine.scheduler.expire(0.0))  # complete resumed requests are told

    def _check_end(self, name: str, asked: EngineRequest) -> None:
        if name in self.engine.silent:
            return
        seen = self.engine.seen[name]
        self.truth.check_usage(asked, seen)
        if seen.last.finish is FinishReason.ERROR:
            self.truth.check_error(asked, seen)
            return
        assert seen.tokens == self.truth.new_tokens(name)
        assert seen.last.finish is not None or self.role is Role.PREFILL
        with_prompt = [o for o in seen.outputs if o.prompt_logprobs is not None]
        if asked.sampling.prompt_logprobs is not None and not asked.generated_token_ids and self.role is not Role.DECODE:
            assert len(with_prompt) == 1
            tokens = [p.token_id if p else None for p in with_prompt[0].prompt_logprobs or ()]
            assert tokens == [None, *asked.prompt_token_ids[1:]]
