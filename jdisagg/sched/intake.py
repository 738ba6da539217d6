"""What a worker can ever serve, checked before a request costs anything."""

from __future__ import annotations

from dataclasses import dataclass

from jdisagg.core.config import SchedulerConfig
from jdisagg.core.errors import ConfigError, InvalidRequest
from jdisagg.core.requests import EngineRequest, Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Sizes of one worker."""

    role: Role
    max_model_len: int  # tokens
    page_size: int  # tokens
    num_usable_pages: int
    num_lookahead: int = 0

    @property
    def pool_tokens(self) -> int:
        """Tokens whose KV fits in the whole pool."""
        return self.page_size * self.num_usable_pages


def check_config(config: SchedulerConfig, limits: Limits) -> None:
    """Raise ConfigError for sizes with which no plan could ever be made."""
    if config.scheduling_policy not in ("fcfs", "priority"):
        raise ConfigError(f"scheduling_policy is {config.scheduling_policy!r}; use fcfs or priority", field="scheduling_policy")
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_queue_len"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}; use at least 1", field=name)
    for name in ("long_prefill_token_threshold", "reserved_decode_tokens"):
        if getattr(config, name) < 0:
            raise ConfigError(f"{name} is {getattr(config, name)}; use 0 or more", field=name)
    rows = config.max_num_seqs * (1 + limits.num_lookahead)
    if limits.role is not Role.PREFILL and config.max_num_batched_tokens < rows:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}, but {config.max_num_seqs} sequences decode {rows} "
            f"tokens a step; use --max-num-batched-tokens {rows} or more, or fewer --max-num-seqs",
            field="max_num_batched_tokens",
        )


def check_request(request: EngineRequest, limits: Limits) -> None:
    """Raise InvalidRequest when the request could not run on an empty worker; the message has the number to use."""
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    if num_prompt == 0:
        raise InvalidRequest("the prompt has no token; send at least one", field="prompt")
    if max_tokens < 0 or request.sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"max_tokens is {max_tokens} with min_tokens {request.sampling.min_tokens}; use max_tokens >= min_tokens >= 0",
            field="max_tokens",
        )
    if len(request.generated_token_ids) > max_tokens:
        raise InvalidRequest(
            f"{len(request.generated_token_ids)} tokens are generated already, max_tokens is {max_tokens}", field="max_tokens"
        )
    if limits.role is Role.PREFILL:
        num_known = len(request.token_ids)
        _check_total(num_known, limits.max_model_len, "this worker's context length is", request, spare=num_known)
        _check_total(num_known, limits.pool_tokens, "this worker's KV pool holds", request, spare=num_known)
        return
    _check_total(num_prompt + max_tokens, limits.max_model_len, "the model's context length is", request, spare=num_prompt)
    num_kv = num_prompt + max(0, max_tokens - 1) + limits.num_lookahead  # the last token's KV is never written
    _check_total(num_kv, limits.pool_tokens, "this worker's KV pool holds", request, spare=num_prompt)


def _check_total(total: int, limit: int, what: str, request: EngineRequest, spare: int) -> None:
    """`spare` = tokens that cannot be had for less; what is left of `limit` beyond them is the max_tokens to use."""
    if total <= limit:
        return
    advice = f"use max_tokens <= {limit - spare}" if spare < limit else f"shorten the prompt to {limit - 1} tokens or fewer"
    raise InvalidRequest(
        f"prompt of {len(request.prompt_token_ids)} tokens with max_tokens {request.sampling.max_tokens} needs room for "
        f"{total} tokens; {what} {limit} tokens: {advice}",
        field="max_tokens" if spare < limit else "prompt",
    )
