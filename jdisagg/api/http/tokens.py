"""POST /tokenize and /detokenize, GET /v1/models."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jdisagg.api.generation.edge import Edge
from jdisagg.api.generation.intake import check_model
from jdisagg.api.generation.sampling_bounds import check_token_ids
from jdisagg.api.http.answer_json import long_json
from jdisagg.api.http.body import read_body
from jdisagg.api.http.connection import while_connected
from jdisagg.api.http.messages import render_prompt
from jdisagg.api.http.thoughts import read_thinking
from jdisagg.api.http.unserved import CHAT_FIELDS, refuse_unserved
from jdisagg.core.errors import InvalidRequest

MAX_CHARACTERS = 2**20  # of one text: a million takes the tokenizer seconds
MAX_TOKENS = 2**20
_STRINGS_WEIGHT = 4  # of a text whose tokens are shown as strings: those take three times as long as its tokens
_OF_CHATS = ("parallel_tool_calls", "return_token_ids", "top_logprobs")  # that look like what is read of them here


class TokenEndpoints:
    """What needs the tokenizer and the model's card, but no engine."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._started = int(time.time())

    async def tokenize(self, request: Request) -> Response:
        """`prompt` to token ids, or `messages` to those that a chat of them begins with; also more than the context holds: who
        is to cut them has to count."""
        body = await read_body(request)
        check_model(body.text("model") or "", self._edge.card)
        tokenizer = self._edge.tokenizer
        if body.get("messages") is not None:
            refuse_unserved(body, CHAT_FIELDS)

            def render() -> str:
                prompt = render_prompt(body, tokenizer.chat)
                read_thinking(body, self._edge, prompt, None)
                return prompt

            reading = self._edge.with_tokenizer(render, body.num_bytes if body.is_long else 0)
            text = await while_connected(request.receive, reading)
            special = body.boolean("add_special_tokens", False)
        else:
            text, special = body.text("prompt"), body.boolean("add_special_tokens", True)
        if text is None:
            raise InvalidRequest.of("prompt", "give a prompt (a string) or messages")
        if len(text) > MAX_CHARACTERS:
            raise InvalidRequest.of("prompt", f"at most {MAX_CHARACTERS} characters; got {len(text)}, split them")
        max_model_len = self._edge.card.max_model_len  # a router's is not for threads
        with_strings = body.boolean("return_token_strs")
        body.refuse_misspelt(*_OF_CHATS)
        work = partial(self._tokens_of, text, special, with_strings, max_model_len)
        return await self._answer(request, work, len(text) * (_STRINGS_WEIGHT if with_strings else 1))

    async def _answer(self, request: Request, work: Callable[[], dict[str, Any]], num_characters: int) -> Response:
        """`work` and the writing of what it returns are done when it is their turn, for a client that is still there."""

        def write() -> bytes:
            return long_json(work())

        content = await while_connected(request.receive, self._edge.with_tokenizer(write, num_characters))
        return Response(content, media_type="application/json")

    def _tokens_of(self, text: str, add_special_tokens: bool, with_strings: bool, max_model_len: int) -> dict[str, Any]:
        tokenizer = self._edge.tokenizer
        token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        answer = {"count": len(token_ids), "max_model_len": max_model_len, "tokens": list(token_ids)}
        if with_strings:
            answer["token_strs"] = [tokenizer.token_text(token_id) for token_id in token_ids]
        return answer

    async def detokenize(self, request: Request) -> Response:
        """`tokens` to text, special tokens included."""
        body = await read_body(request)
        check_model(body.text("model") or "", self._edge.card)
        if body.get("tokens") is None:
            raise InvalidRequest.of("tokens", "give a list of token ids")
        token_ids = body.integers("tokens")
        if len(token_ids) > MAX_TOKENS:
            raise InvalidRequest.of("tokens", f"at most {MAX_TOKENS} ids; got {len(token_ids)}, split them")
        check_token_ids(token_ids, self._edge.card.vocab_size, "tokens")
        body.refuse_misspelt()
        decode = partial(self._edge.tokenizer.decode, token_ids, skip_special_tokens=False)
        return await self._answer(request, lambda: {"prompt": decode()}, len(token_ids))

    async def models(self, request: Request) -> Response:
        """The served model, as a list."""
        return JSONResponse({"object": "list", "data": [self._model_object()]})

    async def model(self, request: Request) -> Response:
        """One model by name; without one, behind a slash, the list."""
        if not (name := request.path_params["name"]):
            return await self.models(request)
        check_model(name, self._edge.card)
        return JSONResponse(self._model_object())

    def _model_object(self) -> dict[str, Any]:
        card = self._edge.card
        model: dict[str, Any] = {"id": card.name, "object": "model", "created": self._started, "owned_by": "jdisagg"}
        vllm = {"root": self._edge.source or card.name, "parent": None, "max_model_len": card.max_model_len}
        return model | vllm | {"fingerprint": card.fingerprint}
