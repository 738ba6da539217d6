from jdisagg.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CacheGroup(_message.Message):
    __slots__ = ("num_layers", "num_kv_heads", "features", "dtype", "kind", "window", "page_size")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_kv_heads: int
    features: int
    dtype: str
    kind: str
    window: int
    page_size: int
    def __init__(self, num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., features: _Optional[int] = ..., dtype: _Optional[str] = ..., kind: _Optional[str] = ..., window: _Optional[int] = ..., page_size: _Optional[int] = ...) -> None: ...

class Rank(_message.Message):
    __slots__ = ("endpoint", "head_begin", "head_end")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    HEAD_BEGIN_FIELD_NUMBER: _ClassVar[int]
    HEAD_END_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    head_begin: int
    head_end: int
    def __init__(self, endpoint: _Optional[str] = ..., head_begin: _Optional[int] = ..., head_end: _Optional[int] = ...) -> None: ...

class TransferBackend(_message.Message):
    __slots__ = ("name", "version", "num_transport_addresses", "endpoint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSPORT_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    num_transport_addresses: int
    endpoint: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., num_transport_addresses: _Optional[int] = ..., endpoint: _Optional[str] = ...) -> None: ...

class FingerprintPart(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Identity(_message.Message):
    __slots__ = ("min_protocol", "max_protocol", "build", "fingerprint", "worker", "epoch", "groups", "ranks", "backends", "fingerprint_parts", "grammars", "bits", "grammar_kinds")
    MIN_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MAX_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_PARTS_FIELD_NUMBER: _ClassVar[int]
    GRAMMARS_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_KINDS_FIELD_NUMBER: _ClassVar[int]
    min_protocol: int
    max_protocol: int
    build: str
    fingerprint: str
    worker: str
    epoch: str
    groups: _containers.RepeatedCompositeFieldContainer[CacheGroup]
    ranks: _containers.RepeatedCompositeFieldContainer[Rank]
    backends: _containers.RepeatedCompositeFieldContainer[TransferBackend]
    fingerprint_parts: _containers.RepeatedCompositeFieldContainer[FingerprintPart]
    grammars: bool
    bits: str
    grammar_kinds: _containers.RepeatedScalarFieldContainer[_common_pb2.GrammarKind]
    def __init__(self, min_protocol: _Optional[int] = ..., max_protocol: _Optional[int] = ..., build: _Optional[str] = ..., fingerprint: _Optional[str] = ..., worker: _Optional[str] = ..., epoch: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[CacheGroup, _Mapping]]] = ..., ranks: _Optional[_Iterable[_Union[Rank, _Mapping]]] = ..., backends: _Optional[_Iterable[_Union[TransferBackend, _Mapping]]] = ..., fingerprint_parts: _Optional[_Iterable[_Union[FingerprintPart, _Mapping]]] = ..., grammars: _Optional[bool] = ..., bits: _Optional[str] = ..., grammar_kinds: _Optional[_Iterable[_Union[_common_pb2.GrammarKind, str]]] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("identity",)
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ...) -> None: ...

class HelloResponse(_message.Message):
    __slots__ = ("identity", "protocol", "backend", "draining", "speed")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    protocol: int
    backend: str
    draining: bool
    speed: _common_pb2.Speed
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., protocol: _Optional[int] = ..., backend: _Optional[str] = ..., draining: _Optional[bool] = ..., speed: _Optional[_Union[_common_pb2.Speed, _Mapping]] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("begin", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("request", "held_tokens", "epoch", "backend", "max_piece_tokens", "backends", "head_shards", "pulse", "lending", "goes_on")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    MAX_PIECE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SHARDS_FIELD_NUMBER: _ClassVar[int]
    PULSE_FIELD_NUMBER: _ClassVar[int]
    LENDING_FIELD_NUMBER: _ClassVar[int]
    GOES_ON_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.EngineRequest
    held_tokens: int
    epoch: str
    backend: str
    max_piece_tokens: int
    backends: _containers.RepeatedScalarFieldContainer[str]
    head_shards: int
    pulse: str
    lending: Lending
    goes_on: bool
    def __init__(self, request: _Optional[_Union[_common_pb2.EngineRequest, _Mapping]] = ..., held_tokens: _Optional[int] = ..., epoch: _Optional[str] = ..., backend: _Optional[str] = ..., max_piece_tokens: _Optional[int] = ..., backends: _Optional[_Iterable[str]] = ..., head_shards: _Optional[int] = ..., pulse: _Optional[str] = ..., lending: _Optional[_Union[Lending, _Mapping]] = ..., goes_on: _Optional[bool] = ...) -> None: ...

class Lending(_message.Message):
    __slots__ = ("address", "backend", "dtype")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    address: str
    backend: str
    dtype: str
    def __init__(self, address: _Optional[str] = ..., backend: _Optional[str] = ..., dtype: _Optional[str] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("credit_bytes",)
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    credit_bytes: int
    def __init__(self, credit_bytes: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

class Want(_message.Message):
    __slots__ = ("range", "reason", "group", "backend", "piece_tokens")
    RANGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    PIECE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    range: Range
    reason: str
    group: int
    backend: str
    piece_tokens: int
    def __init__(self, range: _Optional[_Union[Range, _Mapping]] = ..., reason: _Optional[str] = ..., group: _Optional[int] = ..., backend: _Optional[str] = ..., piece_tokens: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("open", "grant", "ack", "want", "heartbeat", "chunk_ready", "declined")
    class Heartbeat(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    OPEN_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_READY_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    open: Open
    grant: Grant
    ack: Ack
    want: Want
    heartbeat: PrefillRequest.Heartbeat
    chunk_ready: ChunkReady
    declined: Declined
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., want: _Optional[_Union[Want, _Mapping]] = ..., heartbeat: _Optional[_Union[PrefillRequest.Heartbeat, _Mapping]] = ..., chunk_ready: _Optional[_Union[ChunkReady, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ...) -> None: ...

class Declined(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("cached_tokens",)
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Parked(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ChunkReady(_message.Message):
    __slots__ = ("key", "range", "group", "shape", "dtype", "num_bytes", "checksum", "backend", "locator")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    LOCATOR_FIELD_NUMBER: _ClassVar[int]
    key: str
    range: Range
    group: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    num_bytes: int
    checksum: int
    backend: str
    locator: str
    def __init__(self, key: _Optional[str] = ..., range: _Optional[_Union[Range, _Mapping]] = ..., group: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., num_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., backend: _Optional[str] = ..., locator: _Optional[str] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("first", "num_chunks")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    first: _common_pb2.Output
    num_chunks: int
    def __init__(self, first: _Optional[_Union[_common_pb2.Output, _Mapping]] = ..., num_chunks: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: _common_pb2.RequestFailure
    def __init__(self, error: _Optional[_Union[_common_pb2.RequestFailure, _Mapping]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("accepted", "chunk_ready", "done", "refused", "want", "heartbeat", "started", "parked", "grant", "ack")
    class Heartbeat(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_READY_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    chunk_ready: ChunkReady
    done: Done
    refused: Refused
    want: Want
    heartbeat: PrefillResponse.Heartbeat
    started: Started
    parked: Parked
    grant: Grant
    ack: Ack
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., chunk_ready: _Optional[_Union[ChunkReady, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., want: _Optional[_Union[Want, _Mapping]] = ..., heartbeat: _Optional[_Union[PrefillResponse.Heartbeat, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., parked: _Optional[_Union[Parked, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("key", "part_bytes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    key: str
    part_bytes: int
    def __init__(self, key: _Optional[str] = ..., part_bytes: _Optional[int] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
