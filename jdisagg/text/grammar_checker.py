"""A process that tries to compile grammars, so that one which no compiler survives ends this process and no server.

Some few kilobytes of regular expressions can take for ever, gigabytes, or the stack. Started by `GrammarGate` as
`python -m jdisagg.text.grammar_checker`; lines of JSON come and go:

    {"tokenizer_json": .., "size": .., "eos_token_ids": [..], "special_ids": [..]}     first, once
    {"kind": .., "text": ..}    ->    {}                          it is being compiled: what ends this process now, it did
                                ->    {"error": ".."}             "" = it compiles
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import threading
from typing import Any

from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import Grammar, GrammarKind
from jdisagg.text.grammar import Grammars, Vocabulary, most_bytes

MOST_S = 5.0  # of a processor's time, for one grammar; ordinary ones take milliseconds
_MOST_BYTES = 2**27 + 2**26  # of address space for one, beside what the tokenizer takes; its thread reserves a third
_ADDRESS_SPACE, _RESIDENT = 0, 1  # of /proc/self/statm
_STACK_BYTES = 2**20  # less than the threads of any server have: what fits here fits there


def main() -> None:
    """Answer until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server's own end closes standard input
    given = json.loads(sys.stdin.readline())
    eos, special = tuple(given["eos_token_ids"]), tuple(given["special_ids"])
    vocabulary = Vocabulary(given["tokenizer_json"], given["size"], eos, special)
    grammars = Grammars(vocabulary, most_kept=0)  # those before would take of what this one has
    _, most = resource.getrlimit(resource.RLIMIT_AS)  # whoever started the server may have set one
    wanted = _num_bytes(_ADDRESS_SPACE) + _MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    threading.excepthook = lambda _: os._exit(1)  # memory is at its end, or the library
    for line in sys.stdin:
        thread = threading.Thread(target=_answer, args=(grammars, json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, MOST_S)  # nobody handles it: whatever goes on then is over
        thread.start()  # where the machine has none left this is the end, and no word was said of the grammar
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _answer(grammars: Grammars, asked: dict[str, Any]) -> None:
    print("{}", flush=True)
    try:
        error = _looked_at(grammars, Grammar(GrammarKind(asked["kind"]), asked["text"]))
    except InvalidRequest as refused:
        error = refused.message
    print(json.dumps({"error": error}), flush=True)


def _looked_at(grammars: Grammars, grammar: Grammar) -> str:
    """What is wrong with one that compiles: forty characters may take 100 MiB in each process that has it, for as long as it
    is kept. What `bad_words` take has bounds of its own, and the first of them reads the vocabulary."""
    before = _allocated()
    held = grammars.compile(grammar)
    taken, most = _allocated() - before, most_bytes(grammar)
    del held
    if taken <= most or grammar.kind is GrammarKind.BAD_WORDS:
        return ""
    told = f"compiled it takes {taken / 2**20:.1f} MiB, of {most / 2**20:.1f} that one of its length may take; make it simpler"
    return f"grammar ({grammar.kind.value}): {told}"


class _Mallinfo(ctypes.Structure):
    """malloc.h"""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


def _allocated() -> int:
    """Bytes; where the C library does not tell (glibc before 2.33, musl), those that are resident."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return _num_bytes(_RESIDENT)
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return info.uordblks + info.hblkhd


def _num_bytes(which: int) -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[which]) * resource.getpagesize()


if __name__ == "__main__":
    main()
