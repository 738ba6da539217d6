"""The formats by the names that vLLM's `--tool-call-parser` has for them."""

from __future__ import annotations

from collections.abc import Mapping

from jdisagg.text.calls.format import ModelFormat
from jdisagg.text.calls.hermes import Hermes
from jdisagg.text.calls.llama3_json import Llama3Json
from jdisagg.text.calls.mistral import Mistral

FORMATS: Mapping[str, ModelFormat] = {"hermes": Hermes(), "llama3_json": Llama3Json(), "mistral": Mistral()}
