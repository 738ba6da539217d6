"""Schemas as a request's are read, and whether an answer is of one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jdisagg.core.errors import InvalidRequest
from tests.unit.text.grammar_rig import advanced, allowed, demo_grammars, demo_tokenizer, demo_vocabulary, schema


def takes(asked: Any, answer: Any) -> bool:
    """Whether that value, or that JSON if it is text, is a whole answer."""
    text = answer if isinstance(answer, str) else json.dumps(answer)
    matcher = advanced(demo_grammars(), schema(json.dumps(asked)), demo_tokenizer().encode(text, add_special_tokens=False))
    return not matcher.error and not allowed(matcher).isdisjoint(demo_vocabulary().eos_token_ids)


def is_refused(asked: Any, why: str) -> bool:
    with pytest.raises(InvalidRequest, match=why):
        demo_grammars().compile(schema(json.dumps(asked)))
    return True
