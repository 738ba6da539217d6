"""A TokenEngine whose tokens a reader computes by hand, and the whole edge on real sockets around it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc.aio
from openai import AsyncOpenAI

from jdisagg.api import channels
from jdisagg.api.generation.choice import ChoiceText
from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.intake import Conversion, Job
from jdisagg.api.generation.service import GenerationServicer
from jdisagg.api.generation.token_engine import Enough, Health
from jdisagg.api.http.app import make_app
from jdisagg.api.http.server import HttpServer
from jdisagg.api.listening import listen
from jdisagg.core.config import ServerConfig
from jdisagg.core.errors import InvalidRequest, RequestError
from jdisagg.core.fleet import ModelCard
from jdisagg.core.metrics import HTTP_PORT, Metrics
from jdisagg.core.requests import EngineRequest, FinishReason, Grammar, Output, Provenance, SamplingParams, TokenLogprob
from jdisagg.text.calls.format import ModelFormat
from jdisagg.text.thoughts import ThoughtMarks
from jdisagg.text.tokenizer import Tokenizer
from jdisagg.v1 import generation_pb2_grpc

WAIT_LIMIT_S = 20.0
T = TypeVar("T")
EOS = 1
TIME_LIMIT_S = 120.0  # only what hangs takes so long: tests ask for hundreds of answers
PROVENANCE = Provenance(prefill_worker="pid 1 @ p", decode_worker="pid 2 @ d", prefilled_tokens=3, transferred_bytes=99)


class FakeEngine:
    """Answers choice c with `answers[c % len]` and EOS. Token i has logprob -(i + 1), its alternatives begin at token i + 2."""

    def __init__(self, tokenizer: Tokenizer, *answers: str, max_model_len: int = 200) -> None:
        self.card = ModelCard(
            name="tiny", max_model_len=max_model_len, vocab_size=tokenizer.vocab_size, eos_token_ids=(EOS,), fingerprint="fp"
        )
        self.answers = [tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
        self.tokens_per_output = 1
        self.delay_s = 0.0
        self.refusal: RequestError | None = None  # raised at admission
        self.failure: tuple[int, RequestError] | None = None  # (after so many tokens, error)
        self.requests: list[EngineRequest] = []
        self.live: set[str] = set()
        self.cancelled: list[str] = []
        self.had_enough: list[str] = []  # of the cancelled ones
        self.state = Health()

    async def first_card(self, deadline_s: float) -> ModelCard:
        """See TokenEngine."""
        return self.card

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Output]:
        """See TokenEngine."""
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        self.live.add(request.request_id)
        finished = False
        try:
            for output in self._outputs(request):
                await asyncio.sleep(self.delay_s)
                finished = output.finish is not None
                yield output
        except Enough:
            self.had_enough.append(request.request_id)
            raise
        finally:
            self.live.remove(request.request_id)
            if not finished:
                self.cancelled.append(request.request_id)

    def _outputs(self, request: EngineRequest) -> list[Output]:
        sampling = request.sampling
        answer = self.answers[request.choice % len(self.answers)]
        tokens = (answer if sampling.ignore_eos else (*answer, EOS))[: sampling.max_tokens]
        outputs = []
        for begin in range(0, len(tokens), self.tokens_per_output):
            part = tokens[begin : begin + self.tokens_per_output]
            last = begin + len(part) == len(tokens)
            stopped = last and part[-1] == EOS
            if self.failure is not None and begin >= self.failure[0]:
                return [*outputs, Output(request_id=request.request_id, finish=FinishReason.ERROR, error=self.failure[1])]
            num_top = sampling.logprobs or 0
            scored = tuple(_logprob(position, token, num_top) for position, token in enumerate(part, start=begin))
            finish = (FinishReason.STOP if stopped else FinishReason.LENGTH) if last else None
            outputs.append(
                Output(
                    request_id=request.request_id,
                    token_ids=part,
                    logprobs=scored if sampling.logprobs is not None else None,
                    prompt_logprobs=_prompt_logprobs(request) if begin == 0 else None,
                    finish=finish,
                    stop_token_id=EOS if stopped else None,
                    cached_tokens=2 if last else 0,
                    provenance=PROVENANCE if last else None,
                )
            )
        return outputs

    def health(self) -> Health:
        """See TokenEngine."""
        return self.state

    async def debug_state(self) -> dict[str, Any]:
        """See TokenEngine."""
        return {"live": sorted(self.live)}


def _logprob(position: int, token_id: int, num_top: int) -> TokenLogprob:
    top = tuple((position + 2 + rank, -0.25 - rank) for rank in range(num_top))
    return TokenLogprob(token_id=token_id, logprob=-(position + 1.0), top=top)


def _prompt_logprobs(request: EngineRequest) -> tuple[TokenLogprob | None, ...] | None:
    if request.sampling.prompt_logprobs is None:
        return None
    top = tuple((9 + rank, -0.1 - rank) for rank in range(request.sampling.prompt_logprobs))
    scored = (TokenLogprob(token_id=token, logprob=-0.5, top=top) for token in request.prompt_token_ids[1:])
    return (None, *scored)


def choice_text(
    tokenizer: Tokenizer,
    prompt_token_ids: tuple[int, ...] = (0,),
    *,
    echo_text: str | None = None,
    stop_token_ids: tuple[int, ...] = (),
    skip_special_tokens: bool = True,
    shows_stop: bool = False,
) -> ChoiceText:
    """Of the only choice there is."""
    sampling = SamplingParams(stop_token_ids=stop_token_ids)
    request = EngineRequest(request_id="r/0", prompt_token_ids=prompt_token_ids, sampling=sampling, deadline_s=0.0)
    job = Job(
        request_id="r",
        requests=(request,),
        echo_texts=None if echo_text is None else (echo_text,),
        n=1,
        stop=(),
        scores_only=False,
        conversion=Conversion(skip_special_tokens=skip_special_tokens, shows_stop=shows_stop),
        deadline_s=0.0,
    )
    return ChoiceText(tokenizer, job, 0)


class FakeGrammars:
    """Takes every grammar, but for one whose text holds "@"."""

    def __init__(self) -> None:
        self.prepared: list[Grammar] = []
        self.error = InvalidRequest("grammar: has an @", field="grammar")  # one for all, as of a cache

    async def prepare(self, grammar: Grammar) -> None:
        """See GrammarGate."""
        self.prepared.append(grammar)
        if "@" in grammar.text:
            raise self.error


@dataclass
class Served:
    """A running edge."""

    engine: FakeEngine
    edge: Edge
    http: str  # base URL
    port: int
    grpc_address: str
    client: AsyncOpenAI
    stub: generation_pb2_grpc.GenerationServiceStub
    metrics: Metrics
    grammars: FakeGrammars

    def ends(self) -> dict[str, float]:
        """Requests that no engine saw, by reason; a FakeEngine counts nothing."""
        samples = [sample for family in self.metrics.requests.finished.collect() for sample in family.samples if sample.value]
        return {sample.labels["reason"]: sample.value for sample in samples}

    def num_refused(self) -> float:
        """Connections over HTTP that found no room."""
        return self.metrics.registry.get_sample_value("jdisagg_connections_refused_total", {"port": "http"}) or 0.0

    async def wait_idle(self) -> None:
        """Until nothing runs; fails when that takes long, whatever the engine's delay."""
        async with asyncio.timeout(WAIT_LIMIT_S):
            while self.engine.live or self.edge._live:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(
    engine: FakeEngine,
    tokenizer: Tokenizer,
    *,
    api_key: str | None = None,
    client_api_key: str | None = None,
    call_format: ModelFormat | None = None,
    thought_marks: ThoughtMarks | None = None,
    max_new_tokens: int | None = None,
    port: int = 0,
) -> AsyncIterator[Served]:
    """HTTP (at `port`, 0 = a free one) and gRPC on real sockets; on exit nothing may be left running."""
    metrics, grammars = Metrics(), FakeGrammars()
    edge = Edge(
        engine,
        tokenizer,
        default_deadline_s=60.0,
        draw_seed=lambda: 77,
        max_new_tokens=max_new_tokens,
        metrics=metrics,
        grammars=grammars,
        call_format=call_format,
        thought_marks=thought_marks,
    )
    config = ServerConfig(api_key=api_key, client_api_key=client_api_key)
    app = make_app(edge, engine, lambda: "jdisagg_up 1\n", config)
    server = HttpServer(app, listen(port=port), on_refused=metrics.connections_refused.labels(port=HTTP_PORT).inc)
    await server.start()
    grpc_server = channels.make_server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(edge), grpc_server)
    grpc_address = channels.bind(grpc_server)
    await grpc_server.start()
    url = f"http://{server.address}"
    async with (
        AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key or "none", max_retries=0, timeout=60.0) as client,
        grpc.aio.insecure_channel(grpc_address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        served = Served(engine, edge, url, server.port, grpc_address, client, stub, metrics, grammars)
        try:
            yield served
            await served.wait_idle()
        finally:
            await grpc_server.stop(0.5)
            await server.stop(0.0)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run one test's coroutine with a time limit."""

    async def limited() -> T:
        async with asyncio.timeout(TIME_LIMIT_S):
            return await work

    return asyncio.run(limited())


def living(*kinds: type[Any]) -> list[Any]:
    """Every object of exactly those kinds in this process: `isinstance` would ask each one, and those of torch warn."""
    return [one for one in gc.get_objects() if any(type(one) is kind for kind in kinds)]
