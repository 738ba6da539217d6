"""The states of a request's life, and how a fleet of two P and two D is brought to hold a request in each.

A state that lasts only as long as a step does is caught by looking often; the others are held from outside: no worker to be
reached, prompts ahead, a frozen receiver, a slow connection, a pool or slots that others fill.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from chaos_kit.catalogue import LOWEST_TOKEN, VOCAB, Entry
from chaos_kit.fleet import FleetPlan
from chaos_kit.lookout import View

SUBJECT_TOKENS, SUBJECT_OUTPUT = 320, 96
DECODED = 4  # tokens: it really decodes
MAX_MODEL_LEN = 768  # all pages of a D
_PAGES = 49  # 48 and the null page: a subject needs 24 to be let in
SIZES = (
    *("--max-model-len", str(MAX_MODEL_LEN), "--page-size", "16", "--max-num-batched-tokens", "32"),
    *("--transfer-chunk-tokens", "32", "--lease-s", "4", "--max-num-seqs", "8"),
)


class Stage(Enum):
    """Where the request is when the blow falls, in the order of its life."""

    AT_ROUTER = "queued at the router"
    P_WAITING = "queued on P"
    P_COMPUTING = "P computing"
    PUBLISHED = "published, not fetched"
    TRANSFERRING = "transferring"
    D_MEMORY = "D waits for memory"
    D_SLOT = "D waits for a slot"
    DECODING = "decoding"
    AFTER_LAST = "after the last token"


class Hold(Enum):
    """What the harness does to keep a request in a state."""

    NOTHING = "caught by looking"
    UNREACHABLE = "no D can be reached"
    FROZEN_D = "D is frozen once P computes"
    SLOW_P = "P's connections are slow"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """How a state is brought about. `others` run before and beside the subject."""

    others: tuple[Entry, ...] = ()
    others_run: int = 0  # so many of them must be decoding before the subject comes
    hold: Hold = Hold.NOTHING
    reached: Callable[[View], bool]

    @property
    def means(self) -> str:
        """For the table."""
        return f"{len(self.others)} others ahead" if self.others else self.hold.value


def drill_plan(model: str, *, slots: int, pages: int = _PAGES, cores: str = "") -> FleetPlan:
    """A fleet with room for little; `cores`, as "0:1", are those of the prefill and of the decode workers."""
    room = ("--max-num-seqs", str(slots), "--num-pages", str(pages))
    of_prefill, of_decode = (("--cpu-affinity", part) if part else () for part in cores.partition(":")[::2])
    return FleetPlan(model=model, sizes=SIZES, prefill_flags=of_prefill, decode_flags=(*room, *of_decode))


def questions(count: int, length: int, max_tokens: int, *, seed: int) -> tuple[Entry, ...]:
    """Of `length` tokens each; every other one sampled."""
    rng = random.Random(f"{seed} {length} {max_tokens}")
    return tuple(
        Entry(
            prompt=tuple(rng.randrange(LOWEST_TOKEN, VOCAB) for _ in range(length)),
            sampling={
                "max_tokens": max_tokens,
                "temperature": 0.9 if number % 2 else 0.0,
                "seed": rng.randrange(2**31),
                "ignore_eos": True,
            },
        )
        for number in range(count)
    )


SUBJECTS = questions(4, SUBJECT_TOKENS, SUBJECT_OUTPUT, seed=1)
_PROMPTS = questions(6, 400, 1, seed=2)  # three for each P; they end there
_MEMORY = questions(2, 340, 428, seed=3)  # one for each D, all of its pool in the end: too little is left for a subject
_SLOTS = questions(4, 16, 150, seed=4)  # two for each D: all slots


def _at_router(view: View) -> bool:
    return view.flight is not None and view.flight["worker"] is None


def _p_waiting(view: View) -> bool:
    return view.prefill is not None and view.prefill.sequence.get("status") == "waiting"


def _p_computing(view: View) -> bool:
    if view.prefill is None or view.prefill.sequence.get("status") != "running":
        return False
    return 0 < view.prefill.sequence["computed_tokens"] < SUBJECT_TOKENS


def _published(view: View) -> bool:
    return view.prefill is not None and view.prefill.handoff.get("pieces", 0) > 0


def _transferring(view: View) -> bool:
    return view.decode is not None and view.decode.handoff.get("pieces_on_the_way", 0) > 0


def _d_memory(view: View) -> bool:
    computed = view.prefill is not None and view.prefill.handoff.get("stage") in ("computed", "parked")
    return computed and view.decode is not None and view.decode.sequence.get("status") == "prealloc"


def _d_slot(view: View) -> bool:
    return view.decode is not None and view.decode.sequence.get("status") == "ready"


def _decoding(view: View) -> bool:
    if view.decode is None or view.decode.sequence.get("status") != "running":
        return False
    return view.decode.sequence["generated_tokens"] >= DECODED


def _by_client(view: View) -> bool:
    return False


SCENES = {
    Stage.AT_ROUTER: Scene(hold=Hold.UNREACHABLE, reached=_at_router),
    Stage.P_WAITING: Scene(others=_PROMPTS, reached=_p_waiting),
    Stage.P_COMPUTING: Scene(reached=_p_computing),
    Stage.PUBLISHED: Scene(hold=Hold.FROZEN_D, reached=_published),
    Stage.TRANSFERRING: Scene(hold=Hold.SLOW_P, reached=_transferring),
    Stage.D_MEMORY: Scene(others=_MEMORY, others_run=2, reached=_d_memory),
    Stage.D_SLOT: Scene(others=_SLOTS, others_run=4, reached=_d_slot),
    Stage.DECODING: Scene(reached=_decoding),
    Stage.AFTER_LAST: Scene(reached=_by_client),  # the client has every token: it says so itself
}


def everything_asked() -> tuple[Entry, ...]:
    """All questions of all scenes, each once."""
    return (*SUBJECTS, *_PROMPTS, *_MEMORY, *_SLOTS)
