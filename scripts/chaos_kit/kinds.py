"""The kinds of faults, by who makes them."""

from __future__ import annotations

from chaos_kit.outcome import Fate

ALL_PREFILL = "kill_all_prefill"  # at once: what was on its way is computed again by D itself
LAST_PREFILL = "sever_last_prefill"  # while there is no other: D asks it once more
SCRIPTED = (
    "kill_prefill",
    ALL_PREFILL,
    "kill_decode",
    "kill_router",
    "freeze_prefill",
    "freeze_decode",
    "hang_prefill",  # the engine alone: its process goes on to answer
    "hang_decode",
    "break_prefill",  # a step fails: the engine tells its streams, and the process ends
    "break_decode",
    "sever",
    LAST_PREFILL,
    "stall",
    "black_hole",
    "starve_prefill",
    "slow_reader",
    "delay",
    "restart_prefill",
    "restart_decode",
)
IN_WORKERS = {  # share of the calls
    "corrupt": 0.02,
    "scramble": 0.02,
    "truncate": 0.02,
    "disconnect": 0.02,
    "missing": 0.02,
    "slow": 0.02,
    "error_array": 0.02,
    "late": 0.01,  # each costs the seconds after which a fetch is taken for lost
    "duplicate": 0.02,
    "duplicate_message": 0.05,
    "late_message": 1.0,  # whenever there is one
}
IN_ROUTERS = {"late_output": 1.0}
BY_CLIENTS = tuple(fate.value for fate in Fate if fate is not Fate.STAYS)
ALL = (*SCRIPTED, *IN_WORKERS, *IN_ROUTERS, *BY_CLIENTS)


def drill_text(rates: dict[str, float]) -> str:
    """JDISAGG_TEST_FAULTS for these shares."""
    return ",".join(f"{kind}:{rate}" for kind, rate in rates.items())
