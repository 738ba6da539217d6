"""`system_fingerprint` in a fleet half old, half new weights: an answer names those that it came from."""

from __future__ import annotations

from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import run
from tests.unit.api_edge.test_overload import edge_over
from tests.unit.router.fakes import FakeWorker, Router
from tests.unit.wire.rig import until

MESSAGES = [{"role": "user", "content": "hello"}]


def test_an_answer_names_the_weights_that_it_came_from_while_others_are_served_beside_them(tokenizer: Tokenizer) -> None:
    async def check() -> None:
        router = await Router().start()
        workers = [await FakeWorker((router.address,), fingerprint=f"weights-{number}").start() for number in (1, 2)]
        await until(lambda: router.linked() == 2)
        async with edge_over(router.engine, tokenizer) as (client, _):
            stream = await client.completions.create(model="demo", prompt=[1, 2], max_tokens=5000, stream=True)
            said = [(await anext(stream)).system_fingerprint]
            (busy,) = [worker for worker in workers if worker.engine.live]
            (idle,) = [worker for worker in workers if worker is not busy]
            busy.draining = True  # as at the end of an upgrade: its streams go on
            await until(lambda: any(member.draining for member in router.engine.workers.members()))
            said += [(await anext(stream)).system_fingerprint for _ in range(3)]
            assert set(said) == {busy.fingerprint}
            busy.draining = False
            await until(lambda: not any(member.draining for member in router.engine.workers.members()))

            whole = await client.completions.create(model="demo", prompt=[1, 2, 3], max_tokens=3)
            chat = await client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=3)
            chunks = await client.chat.completions.create(
                model="demo", messages=MESSAGES, max_tokens=3, stream=True, stream_options={"include_usage": True}
            )
            said = [whole.system_fingerprint, chat.system_fingerprint, *[chunk.system_fingerprint async for chunk in chunks]]
            assert len(idle.engine.seen) == 3
            assert set(said) == {idle.fingerprint}
            await stream.close()
        for worker in workers:
            await worker.die()
        await router.stop()

    run(check())
