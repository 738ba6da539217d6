"""What a GPU's host launches in a step, from the list that XLA:GPU writes beside what it compiles.

A condition or a loop outside the step's CUDA graphs is led by the host, which waits for the device there. Whether one gets into
a graph depends on the versions of driver and CUDA, on all that its branches hold, and on what else XLA refuses to capture.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

_LIST = "*.thunk_sequence_after_thunk_passes.txt"
_LAUNCHED = re.compile(r"^\d+: (k\w+)", re.MULTILINE)  # what a graph or a branch holds is indented
_LED = ("kConditional", "kWhile")


def compile_with_list(lowered: Any) -> tuple[Any, str]:
    """`lowered` compiled, and the list; "" where this compiler writes none."""
    with tempfile.TemporaryDirectory(prefix="jdisagg-aot-") as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        return compiled, "".join(path.read_text() for path in Path(folder).glob(_LIST))


def led(launched: str) -> tuple[str, ...]:
    """Conditions and loops of a list that are in none of its graphs, counted by kind."""
    kinds = Counter(_LAUNCHED.findall(launched))
    return tuple(f"{kinds[kind]} {kind}" for kind in _LED if kinds[kind])
