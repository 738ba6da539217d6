"""What operators ask a running fleet: `python -m jdisagg.fleet list | drain | state | reset-cache`.

    list        the workers of a router: state, load, model           FleetService.List
    drain       one process takes no new requests; waits for its own  AdminService.Drain
    state       its queues, ledgers and streams as JSON               AdminService.Stats, the text of GET /debug/state
    reset-cache its prefix cache forgets what it has                  AdminService.ResetPrefixCache

The fleet's API key is read from the environment. Exit status: 0 done, 1 it is not done (nobody answers, requests still run),
2 a command that cannot be run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import zip_longest
from math import isfinite
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from jdisagg.api.channels import NO_GRPC, Credentials, open_blocking_channel, speaks_no_grpc
from jdisagg.core.errors import ConfigError
from jdisagg.core.settings import API_KEY_VARIABLE, Parser
from jdisagg.core.told import told
from jdisagg.core.values import check_key, keys_of, read_addresses
from jdisagg.v1 import admin_pb2, admin_pb2_grpc, fleet_pb2, fleet_pb2_grpc

EXIT_DONE, EXIT_NOT_DONE, EXIT_BAD_COMMAND = 0, 1, 2
ANSWER_S = 5.0  # for an answer that waits for nothing
MOST_WAIT_S = 86_400.0
_HEADS = "ROLE|ADDRESS|STATE|OF ROUTER|RUNNING|WAITING|FREE PAGES|MODEL|WEIGHTS|VERSION|UPTIME|HTTP|WORKER".split("|")
_ROUTER = "127.0.0.1:9000"
_UNKNOWN = "?"  # to a router, or of a worker, of an older version


def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit status."""
    try:
        args, credentials = _parse(argv), _credentials()
    except ConfigError as error:
        _say(error.message)
        return EXIT_BAD_COMMAND
    try:
        with closing(open_blocking_channel(args.address, credentials)) as channel:
            return args.run(args, channel)
    except grpc.RpcError as error:
        _say(_why(args.address, error))
        return EXIT_NOT_DONE


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Raises ConfigError; exits for `--help`."""
    parser = Parser(
        prog="python -m jdisagg.fleet",
        allow_abbrev=False,
        description="Ask the processes of a running fleet, over gRPC.",
        epilog=f"The fleet's API key, if it has one, is read from the environment: {API_KEY_VARIABLE}.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str, run: Callable[[argparse.Namespace, grpc.Channel], int], text: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        found.set_defaults(run=run)
        return found

    of_router = command("list", _list, "the workers of a router, as it sees them")
    of_router.add_argument("--router", dest="address", default=_ROUTER, metavar="HOST:PORT", help="(%(default)s)")
    of_router.add_argument("--json", action="store_true", help="all that is known of these, and of those lost lately, as JSON")
    drain = command("drain", _drain, "take no new requests; there is no way back but a restart of the process")
    drain.add_argument(
        "--wait-s", type=float, default=30.0, metavar="S", help="at most so long until what runs has ended (%(default)g)"
    )
    asked = f"which to ask whether others do its work ({_ROUTER}, if one is there)"
    drain.add_argument("--router", metavar="HOST:PORT", help=asked)
    state = command("state", _state, "queues, ledgers, streams and the step on the device, as JSON")
    reset = command("reset-cache", _reset_cache, "forget all cached prefixes; requests under way go on")
    for one in (drain, state, reset):
        one.add_argument("address", metavar="HOST:PORT", help="gRPC address of the process, as `list` tells it")
    args = parser.parse_args(list(argv))
    _check_address(args.address, "--router" if args.run is _list else "HOST:PORT")
    if args.run is _drain and args.router is not None:
        _check_address(args.router, "--router")
    if args.run is _drain and not (isfinite(args.wait_s) and 0 <= args.wait_s <= MOST_WAIT_S):
        raise ConfigError(f"--wait-s: wanted 0 to {MOST_WAIT_S:g} seconds, got {args.wait_s:g}")
    return args


def _check_address(address: str, where: str) -> None:
    """Raises ConfigError unless it is one."""
    if len(read_addresses(address, where)) != 1:
        raise ConfigError(f"{where}: wanted one address, got {address!r}")


def _credentials() -> Credentials:
    """Raises ConfigError."""
    api_key = os.environ.get(API_KEY_VARIABLE, "")
    check_key(api_key, API_KEY_VARIABLE)
    return Credentials(api_key=api_key if keys_of(api_key) else None)


def _list(args: argparse.Namespace, channel: grpc.Channel) -> int:
    found = _ask(channel)
    seen = _seen(found)
    if args.json:
        workers = [{"member": _as_json(member), "standing": _as_json(standing)} for member, standing in seen]
        _print(json.dumps({"workers": workers, "lost": list(map(_as_json, found.lost))}, indent=1))
        return EXIT_DONE
    if not seen:
        _print("no worker is registered")
    else:
        _print_table(seen)
    for lost in found.lost:
        _print(f"lost {_age(lost.ago_ms / 1000)} ago: {told(lost.role)} {told(lost.worker)}, {told(lost.why)}")
    return EXIT_DONE


def _ask(channel: grpc.Channel) -> fleet_pb2.ListResponse:
    return fleet_pb2_grpc.FleetServiceStub(channel).List(fleet_pb2.ListRequest(), timeout=ANSWER_S)


def _seen(found: fleet_pb2.ListResponse) -> list[tuple[fleet_pb2.Member, fleet_pb2.Standing | None]]:
    """Each worker, and what is made of it, if its router tells."""
    return list(zip_longest(found.members, found.standings[: len(found.members)]))


def _print_table(seen: Sequence[tuple[fleet_pb2.Member, fleet_pb2.Standing | None]]) -> None:
    rows = [_HEADS, *(_row(member, standing) for member, standing in seen)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    for row, standing in zip(rows, [None, *(standing for _, standing in seen)], strict=True):
        _print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if standing is not None and standing.why:
            _print(f"    {told(standing.why)}")


def _age(seconds: float) -> str:
    for unit, length_s in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _row(member: fleet_pb2.Member, standing: fleet_pb2.Standing | None) -> tuple[str, ...]:
    load = member.load
    state = ("draining" if member.draining else _UNKNOWN) if standing is None else told(standing.state)
    return (
        told(member.role),
        told(member.address),
        state,
        _UNKNOWN if standing is None else str(standing.requests),
        str(load.running),
        str(load.waiting),
        f"{load.free_pages}/{load.total_pages}",
        told(member.model),
        told(member.identity.fingerprint[:8]),
        told(member.identity.build) or _UNKNOWN,
        _age(member.uptime_s) if member.uptime_s > 0 else _UNKNOWN,
        told(member.http_address) or _UNKNOWN,
        told(member.identity.worker),
    )


def _drain(args: argparse.Namespace, channel: grpc.Channel) -> int:
    if warning := _missing_without(args.address, args.router):
        _say(warning)
    request = admin_pb2.DrainRequest(deadline_ms=round(args.wait_s * 1000))
    answer: admin_pb2.DrainResponse = admin_pb2_grpc.AdminServiceStub(channel).Drain(request, timeout=args.wait_s + ANSWER_S)
    if answer.unfinished:
        _print(f"{args.address} takes no new requests; {answer.unfinished} still run after {args.wait_s:g} s")
        return EXIT_NOT_DONE
    _print(f"{args.address} takes no new requests, and none runs: its process can be ended (SIGTERM)")
    return EXIT_DONE


def _missing_without(address: str, router: str | None) -> str:
    """What is to be said before the worker at `address` drains, by the word of a router; "" = nothing, or none was named and
    there is none to ask."""
    credentials, unknown = _credentials(), "it is not known whether others do its work"
    try:
        with closing(open_blocking_channel(router or _ROUTER, credentials)) as channel:
            seen = _seen(_ask(channel))
    except grpc.RpcError as error:
        return f"{unknown}: {_why(router, error)}" if router else ""
    for member, standing in seen:
        if member.address == address:
            missing = "" if standing is None else told(standing.missing_without)
            return f"warning: {told(member.role)} worker {address} drains, and {missing}" if missing else ""
    return f"{unknown}: router {router} has no worker of address {address}" if router else ""


def _state(args: argparse.Namespace, channel: grpc.Channel) -> int:
    answer: admin_pb2.StatsResponse = admin_pb2_grpc.AdminServiceStub(channel).Stats(admin_pb2.StatsRequest(), timeout=ANSWER_S)
    _print(json.dumps(json.loads(answer.json), indent=1))
    return EXIT_DONE


def _reset_cache(args: argparse.Namespace, channel: grpc.Channel) -> int:
    request = admin_pb2.ResetPrefixCacheRequest()
    answer: admin_pb2.ResetPrefixCacheResponse = admin_pb2_grpc.AdminServiceStub(channel).ResetPrefixCache(
        request, timeout=ANSWER_S
    )
    _print(f"{args.address} has forgotten cached prefixes of {answer.pages_freed} pages")
    return EXIT_DONE


def _why(address: str, error: Any) -> str:
    code, details = error.code(), told(error.details() or "")
    if code is grpc.StatusCode.UNIMPLEMENTED and "Method not found" in details:
        return f"{address} is no process that serves this: `list` asks a router, other commands any process of the fleet"
    if speaks_no_grpc(error):
        return f"{address} {NO_GRPC}"
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        wanted = "give the address of a gRPC server that runs (--grpc-port)"
        return f"{address} does not answer: {wanted}; {code.name}: {details}"
    return f"{address}: {code.name}: {details}"


def _as_json(message: Any) -> dict[str, Any] | None:
    if message is None:
        return None
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _say(text: str) -> None:
    sys.stderr.write(f"jdisagg.fleet: {text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
