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

_LISTS = ("*.thunk_sequence_after_thunk_passes.txt", "*.thunk_sequence.txt")  # the first is missing if no pass changed anything
_LAUNCHED = re.compile(r"^\d+: (k\w+)", re.MULTILINE)  # what a graph or a branch holds is indented
_LED = ("kConditional", "kWhile")
UNTOLD = "what its compiler does not tell"


def compile_with_list(lowered: Any) -> tuple[Any, str]:
    """`lowered` compiled, and the list; "" where this compiler writes none. Dumps asked for by XLA_FLAGS are not made."""
    with tempfile.TemporaryDirectory(prefix="jdisagg-aot-") as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_dump_hlo_module_re": ".*"}
        compiled = lowered.compile(compiler_options=dump)
        lists = (list(Path(folder).glob(pattern)) for pattern in _LISTS)
        return compiled, "".join(path.read_text() for path in next(filter(None, lists), []))


def led(launched: str) -> tuple[str, ...]:
    """Conditions and loops of a list that are in none of its graphs, counted by kind; without a list nobody knows."""
    if not launched:
        return (UNTOLD,)
    kinds = Counter(_LAUNCHED.findall(launched))
    return tuple(f"{kinds[kind]} {kind}" for kind in _LED if kinds[kind])
