"""A process that tries to compile grammars, so that one which no compiler survives ends this process and no server.

Some few kilobytes of regular expressions can take for ever, gigabytes, or the stack. Started by `GrammarGate` as
`python -m jdisagg.text.grammar_checker`; lines of JSON come and go:

    {"tokenizer_json": .., "size": .., "eos_token_ids": [..], "special_ids": [..]}     first, once
    {"kind": .., "text": ..}    ->    {}                          it is being compiled: what ends this process now, it did
                                ->    {"error": ".."}             "" = it compiles
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from typing import Any

from jdisagg.core.errors import InvalidRequest
from jdisagg.core.requests import Grammar, GrammarKind
from jdisagg.text.grammar import Grammars, Vocabulary

MOST_S = 5.0  # of a processor's time, for one grammar; ordinary ones take milliseconds
_MOST_BYTES = 2**27 + 2**26  # of address space for one, beside what the tokenizer takes; its thread reserves a third
_STACK_BYTES = 2**20  # less than the threads of any server have: what fits here fits there


def main() -> None:
    """Answer until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server's own end closes standard input
    given = json.loads(sys.stdin.readline())
    eos, special = tuple(given["eos_token_ids"]), tuple(given["special_ids"])
    vocabulary = Vocabulary(given["tokenizer_json"], given["size"], eos, special)
    grammars = Grammars(vocabulary, most_kept=0)  # those before would take of what this one has
    _, most = resource.getrlimit(resource.RLIMIT_AS)  # whoever started the server may have set one
    wanted = _address_space() + _MOST_BYTES
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
    error = ""
    try:
        grammars.compile(Grammar(GrammarKind(asked["kind"]), asked["text"]))
    except InvalidRequest as refused:
        error = refused.message
    print(json.dumps({"error": error}), flush=True)


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
