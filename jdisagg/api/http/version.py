"""Which version of this package is installed."""

from __future__ import annotations

from importlib import metadata


def package_version() -> str:
    """As its installation says it; "unknown" where it runs from a checkout that none was made of."""
    try:
        return metadata.version("jdisagg")
    except metadata.PackageNotFoundError:
        return "unknown"
