"""A client of HTTP/2 that reads what it likes: gRPC's own take whatever comes."""

from __future__ import annotations

import asyncio

DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
ACK = END_STREAM = 1
END_HEADERS = 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_INITIAL_WINDOW_SIZE = (4).to_bytes(2, "big")
_HEAD = ((b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"x"), (b"te", b"trailers"))


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _literal(name: bytes, value: bytes) -> bytes:
    return bytes((0, len(name))) + name + bytes((len(value),)) + value


class RawCall:
    """One gRPC call, alone on its connection. Answers pings and settings while frames are awaited."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def begin(cls, address: str, method: str, message: bytes, *, window: int) -> RawCall:
        """Ask for `method` ("/package.Service/Method"); as many bytes of messages may come as `window` says."""
        host, _, port = address.rpartition(":")
        call = cls(*await asyncio.open_connection(host, int(port)))
        head = (*_HEAD, (b":path", method.encode()), (b"content-type", b"application/grpc"))
        call._writer.write(_PREFACE + _frame(SETTINGS, 0, 0, _INITIAL_WINDOW_SIZE + window.to_bytes(4, "big")))
        call._writer.write(_frame(HEADERS, END_HEADERS, 1, b"".join(_literal(*field) for field in head)))
        call._writer.write(_frame(DATA, END_STREAM, 1, b"\0" + len(message).to_bytes(4, "big") + message))
        return call

    def allow(self, num_bytes: int) -> None:
        """So many more bytes may come."""
        for stream in (0, 1):
            self._writer.write(_frame(WINDOW_UPDATE, 0, stream, num_bytes.to_bytes(4, "big")))

    async def until(self, kind: int, *, ends: bool = False) -> int:
        """Until a frame of `kind` comes, which ends the call if so asked; bytes of messages that came before."""
        num_bytes = 0
        while True:
            head = await self._reader.readexactly(9)
            body = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == kind and (not ends or head[4] & END_STREAM):
                return num_bytes
            if head[3] == DATA:
                num_bytes += len(body)
            elif head[3] in (SETTINGS, PING) and not head[4] & ACK:
                self._writer.write(_frame(head[3], ACK, 0, body if head[3] == PING else b""))

    def close(self) -> None:
        """Hang up."""
        self._writer.close()
