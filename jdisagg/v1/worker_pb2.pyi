from jdisagg.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Submit(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.EngineRequest
    def __init__(self, request: _Optional[_Union[_common_pb2.EngineRequest, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "attempt", "enough")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ENOUGH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    enough: bool
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., enough: _Optional[bool] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("ticks",)
    TICKS_FIELD_NUMBER: _ClassVar[int]
    ticks: int
    def __init__(self, ticks: _Optional[int] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("submits", "cancels", "heartbeat", "router", "opened", "epoch")
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    cancels: _containers.RepeatedCompositeFieldContainer[Cancel]
    heartbeat: Heartbeat
    router: str
    opened: int
    epoch: str
    def __init__(self, submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., cancels: _Optional[_Iterable[_Union[Cancel, _Mapping]]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., router: _Optional[str] = ..., opened: _Optional[int] = ..., epoch: _Optional[str] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("outputs", "heartbeat", "load")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[_common_pb2.Output]
    heartbeat: Heartbeat
    load: Load
    def __init__(self, outputs: _Optional[_Iterable[_Union[_common_pb2.Output, _Mapping]]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "free_pages", "total_pages", "pending_prefill_tokens", "speed")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    PENDING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    free_pages: int
    total_pages: int
    pending_prefill_tokens: int
    speed: _common_pb2.Speed
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., pending_prefill_tokens: _Optional[int] = ..., speed: _Optional[_Union[_common_pb2.Speed, _Mapping]] = ...) -> None: ...
