"""Flags read where no environment is: the Config, or the one line that says what to change."""

import pytest

from jdisagg.core.config import Config
from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import load_config

NO_ENV: dict[str, str] = {}


def load(*argv: str) -> Config:
    return load_config(argv, NO_ENV)


def message(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    assert "\n" not in caught.value.message
    return caught.value.message
