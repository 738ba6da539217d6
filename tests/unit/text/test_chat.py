"""What a chat template shows to the model is found from the template itself."""

from __future__ import annotations

import pytest

from jdisagg.core.errors import ConfigError
from jdisagg.text.chat import ChatTemplate

TEXT = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %}", True),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{% if tools %}{{ tools }}{% endif %}", True),  # Llama 3
        ("{% set offered = namespace(of=tools) %}{% for tool in offered.of %}{{ tool }}{% endfor %}", True),
        ("{% macro show(tools) %}{{ tools }}{% endmacro %}{{ show(tools) }}", True),
        (
            "{% generation %}{% for m in messages %}{% if tools %}{{ tools }}{% break %}{% endif %}{% endfor %}{% endgeneration %}",
            True,
        ),
        ("{# no tools here #}", False),
        ("{{ 'You have no tools.' }}", False),
        ("You have no tools.", False),
        ("{% for m in messages %}{{ m.tools }}{{ m['tools'] }}{% endfor %}", False),
        ("{% set tools_in_user_message = true %}", False),
        ("{% macro show(tools) %}{{ tools }}{% endmacro %}", False),
    ],
)
def test_a_template_shows_tools_where_it_reads_them(source: str, shown: bool) -> None:
    assert ChatTemplate(source + TEXT, {}).shows_tools is shown
    assert ChatTemplate(TEXT, {}, source).shows_tools is shown
    assert ChatTemplate("{{ tools }}", {}, source).shows_tools is shown, "its own counts"


@pytest.mark.parametrize("source", ["{% if %}", "{{ 1 | no_such_filter }}"])
def test_either_template_is_checked_at_load(source: str) -> None:
    for sources in ((source, None), (TEXT, source)):
        with pytest.raises(ConfigError, match="chat template, line 1") as caught:
            ChatTemplate(sources[0], {}, sources[1])
        assert caught.value.field == "model"
