"""The demo's special tokens and chat template; `render` is the template in Python, used to make training documents."""

from __future__ import annotations

BOS, EOS, SYSTEM, USER, ASSISTANT, END = "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (BOS, EOS, SYSTEM, USER, ASSISTANT, END)  # ids 0..5, in this order

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] in ('system', 'developer') %}<|system|>"
    "{% elif message['role'] == 'assistant' %}<|assistant|>"
    "{% else %}<|user|>{% endif %}"
    "{{ '\\n' + message['content'] }}<|end|>\n"  # a newline right after a block would be trimmed
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def render(messages: list[dict[str, str]]) -> str:
    """A conversation as text, without BOS (the packer adds it)."""
    return "".join(f"<|{message['role']}|>\n{message['content']}{END}\n" for message in messages)
