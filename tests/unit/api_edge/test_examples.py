"""Examples of the documentation, as they stand there, against a server."""

from __future__ import annotations

import asyncio
import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from jdisagg.core.errors import Overloaded
from jdisagg.text.tokenizer import Tokenizer
from tests.unit.api_edge.fakes import FakeEngine, run, serving

ROOT = Path(__file__).parents[3]


def printed_by(page: str, engine: FakeEngine, tokenizer: Tokenizer) -> str:
    """What the page's client over gRPC prints."""
    (code,) = re.findall(r"^```python\n([^`]*generation_pb2_grpc[^`]*)^```$", (ROOT / page).read_text(), re.MULTILINE)

    async def check() -> str:
        async with serving(engine, tokenizer) as served:
            here = code.replace("127.0.0.1:9000", served.grpc_address).replace("http://127.0.0.1:8000", served.http)
            with redirect_stdout(io.StringIO()) as out:
                await asyncio.to_thread(exec, here.replace('"demo"', '"tiny"'), {})
            return out.getvalue()

    return run(check())


@pytest.mark.parametrize(
    ("page", "printed"),
    [("README.md", "brown fox\nbrown fox"), ("docs/api.md", "tiny 200\nbrown fox 4 tokens\n")],
)
def test_clients_in_the_pages_run_as_they_are_written(tokenizer: Tokenizer, page: str, printed: str) -> None:
    assert printed_by(page, FakeEngine(tokenizer, "brown fox"), tokenizer) == printed


def test_the_client_in_the_page_for_clients_hears_when_to_come_again(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer, "brown fox")
    engine.refusal = Overloaded("full", retry_after_s=1.5)
    assert printed_by("docs/api.md", engine, tokenizer).splitlines()[1:] == [
        "StatusCode.RESOURCE_EXHAUSTED full again in 1500 ms"
    ]
