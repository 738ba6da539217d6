"""What does not fit the model's context, refused as early as it shows."""

from __future__ import annotations

from jdisagg.core.errors import ContextLengthExceeded

Prompt = str | tuple[int, ...]
MOST_CUT_CHARACTERS = 2**20  # of a text that may be longer than the context, as it is cut: it takes the tokenizer seconds


def check_length(prompt: Prompt, max_model_len: int, max_token_characters: int, *, is_cut: bool = False) -> None:
    """Raise ContextLengthExceeded for text that is too long whatever its tokens are, which need not be tokenized (megabytes
    cost seconds and gigabytes), and for too many ids, before anybody looks at millions of them. `is_cut`: it is cut once it is
    tokens."""
    if is_cut:
        most = max(MOST_CUT_CHARACTERS, max_model_len * max_token_characters)
        if isinstance(prompt, str) and len(prompt) > most:
            told = f"to be cut it may have at most {most} characters; got {len(prompt)}, cut it before you send it"
            raise ContextLengthExceeded.of("prompt", told)
    elif not isinstance(prompt, str):
        if len(prompt) > max_model_len:
            raise too_long(len(prompt), 1, max_model_len, "prompt")
    elif len(prompt) > max_model_len * max_token_characters:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt has {len(prompt)} characters, more "
            f"than {max_token_characters} per token; shorten the prompt",
            field="prompt",
        )


def too_long(
    num_prompt_tokens: int, num_wanted: int, max_model_len: int, field: str, *, scores_only: bool = False
) -> ContextLengthExceeded:
    """The error of a prompt that has no room for `num_wanted` more."""
    wanted = "one more to score it are needed" if scores_only else f"{num_wanted} for the answer were requested"
    return ContextLengthExceeded(
        f"This model's maximum context length is {max_model_len} tokens, but {num_prompt_tokens} in the prompt and "
        f"{wanted}; shorten the prompt{' or lower max_tokens' * (num_wanted > 1)}",
        field=field,
    )
