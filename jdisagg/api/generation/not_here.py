"""GenerationService of a process that serves no requests of clients: who asks is told whom to ask."""

from __future__ import annotations

import grpc
import grpc.aio

from jdisagg.api.status_details import end_call
from jdisagg.v1 import generation_pb2_grpc

ASK_ELSEWHERE = "this is a prefill worker; ask a decode worker or the router"


class NotHere(generation_pb2_grpc.GenerationServiceServicer):
    """Every method ends with UNIMPLEMENTED."""

    async def _refuse(self, request: object, context: grpc.aio.ServicerContext) -> None:
        end_call(context, grpc.StatusCode.UNIMPLEMENTED, ASK_ELSEWHERE)

    Generate = Abort = GetModel = _refuse
