"""Fields of requests to OpenAI, vLLM, SGLang, .. that would change the answer and are not served: refused, never ignored.

One table. What only advises or labels (`user`, `store`, `metadata`, `service_tier`, `prediction`, ..) is not in it and is
ignored, and so is what does nothing without a field that is refused (`early_stopping`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jdisagg.api.http.body import Body
from jdisagg.core.errors import InvalidRequest

OFF = (None, False, "", [], {})


@dataclass(frozen=True, slots=True)
class Unserved:
    """Fields refused for one reason. `nothing`: the values that ask for nothing, which are accepted."""

    names: tuple[str, ...]
    why: str  # what is not served, and what to do
    nothing: tuple[Any, ...] = OFF
    same_as: tuple[str, ...] = ()  # fields of the same meaning: what the first of them says that is there, is accepted, too


_EVERYWHERE = (
    Unserved(
        ("ebnf", "grammar"),
        'grammars in EBNF are not served; write it in Lark as llguidance reads it, as "structured_outputs": {"grammar": ..}',
    ),
    Unserved(("structural_tag",), "structural tags are not served; leave it out, or write a grammar (structured_outputs)"),
    Unserved(
        ("guided_whitespace_pattern",), 'is not served; write it into the schema, as "x-guidance": {"whitespace_pattern": ..}'
    ),
    Unserved(
        ("logits_processors", "custom_logit_processor", "vllm_xargs"),
        "tokens are forbidden by logit_bias and bad_words, and allowed by allowed_token_ids, only; use these or leave it out",
    ),
    Unserved(
        ("suppress_tokens", "bad_words_ids", "banned_tokens", "banned_strings", "custom_token_bans"),
        "tokens are forbidden by logit_bias, and texts by bad_words, alone; use these or leave it out",
    ),
    Unserved(("use_beam_search",), "beam search is not served; leave it out, or take the best of n choices by their logprobs"),
    Unserved(("length_penalty",), "is for beam search, which is not served; leave it out", (*OFF, 1)),
    Unserved(
        (
            *("no_repeat_ngram_size", "dry_multiplier", "xtc_probability", "top_a", "top_n_sigma", "epsilon_cutoff"),
            *("eta_cutoff", "mirostat", "mirostat_mode", "dynatemp_range", "smoothing_factor", "penalty_alpha"),
        ),
        "this kind of sampling is not served; leave it out, or use temperature, top_k, top_p, min_p and the penalties",
        (*OFF, 0),
    ),
    Unserved(
        ("typical_p", "tfs", "tfs_z", "guidance_scale", "cfg_scale"),
        "this kind of sampling is not served; leave it out, or use temperature, top_k, top_p, min_p and the penalties",
        (*OFF, 1),
    ),
    Unserved(("do_sample",), "is not a field here; for the likeliest token each time use temperature 0", (None, True)),
    Unserved(("num_beams",), "beam search is not served; leave it out, or take the best of n choices", (None, 1)),
    Unserved(("repeat_penalty",), "is called repetition_penalty here", (None, 1)),
    Unserved(("random_seed",), "is called seed here", (None, -1)),
    Unserved(("min_new_tokens",), "is called min_tokens here", (None, 0)),
    Unserved(("no_stop_trim",), "is called include_stop_str_in_output here"),
    Unserved(("stop_regex",), "stop strings are plain text; use stop"),
    Unserved(("prompt_embeds", "input_embeds", "input_ids"), "give the prompt as text; /v1/completions takes token ids, too"),
    Unserved(("logprob_token_ids",), "log-probabilities are those of the likeliest tokens; use logprobs"),
    Unserved(("return_hidden_states",), "hidden states are not returned; leave it out"),
    Unserved(("return_tokens",), "is called return_token_ids here"),
    Unserved(("return_prompt_token_ids",), "prompt_token_ids come with return_token_ids; use that"),
    Unserved(("return_meta_info",), "tokens are counted in usage; for their ids use return_token_ids, for scores logprobs"),
    Unserved(("return_cached_tokens_details",), "usage.prompt_tokens_details.cached_tokens is in every answer; leave it out"),
    Unserved(("return_routed_experts",), "experts are not told of; leave it out"),
    Unserved(("return_prompt_text",), "prompts are not returned as text; use return_token_ids and POST /detokenize"),
    Unserved(("repetition_detection",), "answers that repeat themselves go on; leave it out, or use the penalties"),
    Unserved(("watermarking", "watermark"), "answers have no watermark; leave it out"),
    Unserved(("lora_path", "lora", "adapter_id"), "adapters are not served; merge it into the model, or leave it out"),
    Unserved(("session_params",), "requests are independent; send the whole prompt each time"),
    Unserved(
        (
            *("thinking_token_budget", "reasoning_budget", "max_thinking_tokens"),
            *("thinking_budget_tokens", "max_reasoning_tokens"),
        ),
        "thinking has no limit of its own; use max_tokens for the whole answer",
        (None, -1),
    ),
    Unserved(
        ("max_new_tokens", "max_output_tokens", "n_predict", "num_predict"),
        "is called max_tokens here",
        (None,),
        same_as=("max_completion_tokens", "max_tokens"),
    ),
    Unserved(("max_length",), "is called max_tokens here", (None,)),
    Unserved(("stop_sequences",), "is called stop here"),
    Unserved(("stop_token",), "use stop, or stop_token_ids"),
    Unserved(("response_schema",), 'write it as "response_format": {"type": "json_schema", "json_schema": {"schema": ..}}'),
    Unserved(("json_mode",), 'write it as "response_format": {"type": "json_object"}'),
    Unserved(("token_ids",), "token ids are given to /v1/completions, as prompt"),
    Unserved(("return_logprob", "top_logprobs_num"), "log-probabilities are asked for by logprobs", (*OFF, 0)),
    Unserved(
        ("sampling_params", "nvext", "extra_body"), "is not looked into; its fields belong at the top level of the request"
    ),
    Unserved(
        ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
        "prefill and decode workers find each other by --prefill or --router; send the request once, to a router or a decode "
        "worker, without it",
        (*OFF, 0),
    ),
)
COMPLETION_FIELDS = (
    *_EVERYWHERE,
    Unserved(("suffix",), "insertion is not served; leave it out"),
    Unserved(("top_logprobs",), "is a field of chat; use logprobs with a number", (None, 0)),
)
OF_CHATS_ALONE = (Unserved(("messages",), "is a field of /v1/chat/completions; send it there, or a prompt"),)  # without one
CHAT_FIELDS = (
    *_EVERYWHERE,
    Unserved(("functions",), "use tools, which replaced it"),
    Unserved(("function_call",), "use tool_choice, which replaced it", (*OFF, "none", "auto")),
    Unserved(("chat_template",), "the model's own template is used; leave it out, or render it and use /v1/completions"),
    Unserved(("documents",), "documents are not shown to the model; write them into messages"),
    Unserved(("parse_tool_calls",), 'calls are read where tools are offered; use "tool_choice": "none"', (None, True)),
    Unserved(("echo",), "the prompt is not repeated in a chat's answer; leave it out, or use /v1/completions"),
    Unserved(("modalities",), 'answers are text; leave it out, or send ["text"]', (*OFF, ["text"])),
    Unserved(("audio",), "answers are text; leave it out"),
    Unserved(("web_search_options",), "nothing is looked up; leave it out", (None, False)),
    Unserved(("best_of",), "is a field of completions; use n", (None, 1)),
)
MESSAGE_FIELDS = (Unserved(("function_call",), "use tool_calls, which replaced it"),)
LAST_MESSAGE_FIELDS = (Unserved(("prefix", "partial"), "a message is not continued by that; see continue_final_message"),)


def refuse_unserved(body: Body, table: tuple[Unserved, ...]) -> None:
    """Raises InvalidRequest for the first field of `table` that the body asks something of."""
    for entry in table:
        for name in entry.names:
            value = body.unserved(name, entry.why)
            if not is_one_of(value, entry.nothing) and not is_one_of(value, _first_of(body, entry.same_as)):
                raise InvalidRequest.of(f"{body.where}{name}", entry.why)


def _first_of(body: Body, names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(value for name in names if (value := body.get(name)) is not None)[:1]


def is_one_of(value: Any, accepted: tuple[Any, ...]) -> bool:
    """As JSON sees it: 0 is not false, 1 is 1.0."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted)
