"""This project's scheduler in the unified role, committed one step late as the engine loop does it."""

from __future__ import annotations

from collections import deque
from time import thread_time_ns

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.requests import EngineRequest, Role, SamplingParams
from jdisagg.sched.plan import Plan, Sampled, StepResult
from jdisagg.sched.scheduler import Scheduler
from sched_bench.load import PAGE_SIZE, TOKEN_BUDGET, Load, Tick

INCLUDES = (
    "expire + schedule (a plan as plain data: rows, page appends, chunks) + commit one step late (tokens, ends, page hashes, "
    "one Output per token)"
)
EOS = 2
FAR_S = 1e9


def answer(plan: Plan) -> StepResult:
    """What an instant runner returns: one token for each decode row and each chunk that samples."""
    token = (100 + plan.step_id % 1000,)
    slots = [chunk.slot for chunk in plan.prefill if chunk.samples]
    slots.extend(plan.decode)
    return StepResult(step_id=plan.step_id, sampled=tuple(Sampled(slot=slot, token_ids=token) for slot in slots))


class OurSubject:
    """See Subject."""

    def __init__(self, load: Load) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=load.running,
                max_num_batched_tokens=TOKEN_BUDGET + load.running,
                max_queue_len=load.running + load.waiting + 1,
            ),
            role=Role.UNIFIED,
            max_model_len=4096,
            page_size=PAGE_SIZE,
            num_pages=load.num_pages + 1,
            eos_token_ids=(EOS,),
        )
        self._in_flight: deque[StepResult] = deque()
        self._now_s = 0.0

    def add(self, number: int, prompt: list[int], max_tokens: int) -> None:
        """Queue a request."""
        request = EngineRequest(
            request_id=f"r{number}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens),
            deadline_s=FAR_S,
        )
        self.scheduler.add(request, self._now_s)

    def tick(self) -> Tick:
        """Step N+1 is decided before the tokens of N are taken in."""
        self._now_s += 0.01
        t0 = thread_time_ns()
        self.scheduler.expire(self._now_s)
        plan = self.scheduler.schedule(self._now_s)
        t1 = thread_time_ns()
        if not plan.is_empty:
            self._in_flight.append(answer(plan))
        if len(self._in_flight) < 2 and not plan.is_empty:
            return Tick(t1 - t0, 0, len(plan.decode), 0, 0)
        result = self._in_flight.popleft()
        t2 = thread_time_ns()
        outputs = self.scheduler.commit(result)
        t3 = thread_time_ns()
        ended = sum(1 for output in outputs if output.finish is not None)
        return Tick(t1 - t0, t3 - t2, len(plan.decode), len(outputs), ended)
