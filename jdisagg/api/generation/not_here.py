"""GenerationService of a process that serves no requests of clients: who asks is told whom to ask."""

from __future__ import annotations

import grpc
import grpc.aio

from jdisagg.api.status_details import end_call
from jdisagg.v1 import generation_pb2, generation_pb2_grpc

ASK_ELSEWHERE = "this is a prefill worker; ask a decode worker or the router"


class NotHere(generation_pb2_grpc.GenerationServiceServicer):
    """Every method ends with UNIMPLEMENTED."""

    async def Generate(self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Not here."""
        end_call(context, grpc.StatusCode.UNIMPLEMENTED, ASK_ELSEWHERE)

    async def Abort(self, request: generation_pb2.AbortRequest, context: grpc.aio.ServicerContext) -> None:
        """Not here."""
        end_call(context, grpc.StatusCode.UNIMPLEMENTED, ASK_ELSEWHERE)

    async def GetModel(self, request: generation_pb2.GetModelRequest, context: grpc.aio.ServicerContext) -> None:
        """Not here."""
        end_call(context, grpc.StatusCode.UNIMPLEMENTED, ASK_ELSEWHERE)
