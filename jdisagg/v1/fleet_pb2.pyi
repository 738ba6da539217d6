from jdisagg.v1 import peer_pb2 as _peer_pb2
from jdisagg.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Member(_message.Message):
    __slots__ = ("role", "address", "identity", "model", "max_model_len", "load", "draining", "vocab_size", "eos_token_ids", "needs_prefill", "text_digest", "cache_tokens", "not_ready", "alone", "http_address", "uptime_s")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NEEDS_PREFILL_FIELD_NUMBER: _ClassVar[int]
    TEXT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    role: str
    address: str
    identity: _peer_pb2.Identity
    model: str
    max_model_len: int
    load: _worker_pb2.Load
    draining: bool
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    needs_prefill: bool
    text_digest: str
    cache_tokens: int
    not_ready: str
    alone: bool
    http_address: str
    uptime_s: int
    def __init__(self, role: _Optional[str] = ..., address: _Optional[str] = ..., identity: _Optional[_Union[_peer_pb2.Identity, _Mapping]] = ..., model: _Optional[str] = ..., max_model_len: _Optional[int] = ..., load: _Optional[_Union[_worker_pb2.Load, _Mapping]] = ..., draining: _Optional[bool] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., needs_prefill: _Optional[bool] = ..., text_digest: _Optional[str] = ..., cache_tokens: _Optional[int] = ..., not_ready: _Optional[str] = ..., alone: _Optional[bool] = ..., http_address: _Optional[str] = ..., uptime_s: _Optional[int] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("member",)
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    member: Member
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("heartbeat_ms", "dead_after_ms")
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    DEAD_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    heartbeat_ms: int
    dead_after_ms: int
    def __init__(self, heartbeat_ms: _Optional[int] = ..., dead_after_ms: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("address", "epoch", "load", "draining", "not_ready", "alone", "uptime_s")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    address: str
    epoch: str
    load: _worker_pb2.Load
    draining: bool
    not_ready: str
    alone: bool
    uptime_s: int
    def __init__(self, address: _Optional[str] = ..., epoch: _Optional[str] = ..., load: _Optional[_Union[_worker_pb2.Load, _Mapping]] = ..., draining: _Optional[bool] = ..., not_ready: _Optional[str] = ..., alone: _Optional[bool] = ..., uptime_s: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("leaving", "prefill", "unreached")
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    UNREACHED_FIELD_NUMBER: _ClassVar[int]
    leaving: bool
    prefill: PrefillWorkers
    unreached: str
    def __init__(self, leaving: _Optional[bool] = ..., prefill: _Optional[_Union[PrefillWorkers, _Mapping]] = ..., unreached: _Optional[str] = ...) -> None: ...

class PrefillWorkers(_message.Message):
    __slots__ = ("addresses",)
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("members", "standings", "lost")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    STANDINGS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[Member]
    standings: _containers.RepeatedCompositeFieldContainer[Standing]
    lost: _containers.RepeatedCompositeFieldContainer[LostWorker]
    def __init__(self, members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., standings: _Optional[_Iterable[_Union[Standing, _Mapping]]] = ..., lost: _Optional[_Iterable[_Union[LostWorker, _Mapping]]] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("state", "why", "requests", "missing_without")
    STATE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MISSING_WITHOUT_FIELD_NUMBER: _ClassVar[int]
    state: str
    why: str
    requests: int
    missing_without: str
    def __init__(self, state: _Optional[str] = ..., why: _Optional[str] = ..., requests: _Optional[int] = ..., missing_without: _Optional[str] = ...) -> None: ...

class LostWorker(_message.Message):
    __slots__ = ("role", "worker", "why", "ago_ms")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    AGO_MS_FIELD_NUMBER: _ClassVar[int]
    role: str
    worker: str
    why: str
    ago_ms: int
    def __init__(self, role: _Optional[str] = ..., worker: _Optional[str] = ..., why: _Optional[str] = ..., ago_ms: _Optional[int] = ...) -> None: ...
