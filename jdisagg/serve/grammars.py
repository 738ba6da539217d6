"""Whether this process serves requests that have a grammar, decided once, at its start."""

from __future__ import annotations

import logging
from functools import lru_cache
from time import monotonic

from jdisagg.text.grammar import Grammars, Vocabulary
from jdisagg.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def grammars_of(tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Grammars | None:
    """For a model of `vocab_size` tokens; the same object for both engines of a process. None, and a line in the log, where
    requests with a grammar have to be refused."""
    eos = tuple(token_id for token_id in eos_token_ids if token_id < vocab_size)
    started_s, why = monotonic(), ""
    if tokenizer is None:
        why = "there is no tokenizer.json"
    elif not eos:
        why = "the model names no EOS token, with which an answer would end"
    else:
        try:
            size, special = max(vocab_size, tokenizer.vocab_size), tuple(sorted(tokenizer.special_ids))
            grammars = Grammars(Vocabulary(tokenizer.to_json(), size, eos, special))
        except ValueError as error:
            why = str(error)
        else:
            log.info("grammars: tokenizer read in %.2f s", monotonic() - started_s)
            return grammars
    log.warning("requests with a grammar are refused here: %s", why)
    return None
