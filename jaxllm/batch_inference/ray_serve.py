"""The processes of Ray Serve: replicas of the server, and the one that sends requests to them.

Ray's router sees a call's arguments and not a request's body. So `Ingress` reads the body and calls
a replica with the digests of the request's beginnings. The ASGI messages of the answer come back
one by one.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.batch_inference.prefix_routing import SeenBeginnings, digest_beginnings
from jaxllm.lm import LM
from jaxllm.server.app import build_app
from jaxllm.server.backend import ServerSettings
from jaxllm.server.limits import Message, Receive, Scope, Send, read_key
from jaxllm.server.model_client import ModelClient
from jaxllm.server.model_process import ModelSettings


class PrefixRouter(RequestRouter):
    """Chooses replicas by the first argument of a call, its digests (`SeenBeginnings`)."""

    def initialize_state(self, **options: Any) -> None:
        """Take the options of `build`. margin: that of `SeenBeginnings.rank`."""
        self._margin: int = options["margin"]
        self._seen = SeenBeginnings[ReplicaID]()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas; Ray takes the least busy one of the first that has room."""
        digests: Sequence[bytes] = ()
        if pending_request is not None:
            digests = pending_request.args[0]
            pending_request.routing_context.should_backoff = True  # wait if all of them are full
        # Of equals Ray takes the first.
        mixed = random.sample(candidate_replicas, len(candidate_replicas))
        replicas = {replica.replica_id: replica for replica in mixed}
        lengths = {name: self.replica_queue_len_cache.get(name) or 0 for name in replicas}
        ranks = self._seen.rank(digests, lengths, self._margin)
        return [[replicas[name] for name in rank] for rank in ranks]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Note the beginnings of a request that a replica took."""
        self._seen.add(pending_request.args[0], replica_id)


class Replica:
    """The server's application, with a model's process that ends with this one."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, load_model: Callable[[], LM], process: ModelSettings, settings: ServerSettings
    ) -> None:
        client = ModelClient(load_model, process)
        self._app = build_app(client, settings)
        await client.start()

    async def answer(
        self, digests: Sequence[bytes], scope: Scope, body: bytes, is_whole: bool
    ) -> AsyncGenerator[Message]:
        """Yield the messages of the answer to a request; leaving early cancels the answer.

        Args:
            digests: for the router.
            is_whole: the body is complete; the rest of another one will not come.
        """
        given: list[Message] = [{"type": "http.request", "body": body, "more_body": not is_whole}]
        sent = asyncio.Queue[Message | None]()

        async def receive() -> Message:
            if not given and not is_whole:
                raise TimeoutError
            return given.pop() if given else await asyncio.Future[Message]()

        answering = asyncio.create_task(self._app(scope, receive, sent.put))
        answering.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                yield message
            await answering  # raises its error
        finally:
            answering.cancel()
            await asyncio.wait([answering])


class Ingress:
    """Reads requests, and passes the answers of replicas on."""

    def __init__(self, replicas: Any, settings: ServerSettings) -> None:
        self._replicas, self._settings = replicas.options(stream=True), settings

    async def __call__(self, request: Request) -> Response:
        """Return the answer to a request; Ray cancels its replica's part if the client leaves."""
        body, is_whole = b"", False
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.read_seconds):
                async for piece in request.stream():
                    body += piece
                    if len(body) > self._settings.body_bytes:  # the application refuses it
                        break
                is_whole = True
        digests = digest_beginnings(read_key(request.scope), body)
        return _Answer(self._replicas.answer.remote(digests, request.scope, body, is_whole))


class _Answer(Response):
    """An answer that consists of ASGI messages."""

    def __init__(self, messages: AsyncIterator[Message]) -> None:
        super().__init__()
        self._messages = messages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async for message in self._messages:
            await send(message)
