"""An endpoint on this machine that speaks OpenAI's protocol to the agents of a run.

Each episode has a key of its own. There is one model, the policy; what it samples with is the recipe's.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from isotrain.environments.openai_messages import (
    MODEL,
    Completion,
    Refused,
    chat_reply,
    chat_request,
    chunks,
    completion_limits,
    read_body,
    text_reply,
)
from isotrain.environments.session import Session
from isotrain.errors import IsotrainError

logger = logging.getLogger("isotrain")

LONGEST_BODY = 1 << 24

_Reply = Callable[[Completion, int, Mapping[str, Any]], dict[str, Any]]


class Gateway:
    """All is called in one event loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        # A call whose client has gone must not become part of an episode.
        self._runner = web.AppRunner(self._application(), handler_cancellation=True, access_log=None)
        self.base_url = ""

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=LONGEST_BODY, middlewares=[_errors_as_json])
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/v1/chat/completions", self._chat)
        application.router.add_post("/v1/completions", self._complete)
        application.router.add_post("/v1/reward", self._reward)
        return application

    async def start(self) -> None:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        _, port = self._runner.addresses[0][:2]
        self.base_url = f"http://127.0.0.1:{port}/v1"

    async def close(self) -> None:
        self._sessions.clear()
        await self._runner.cleanup()

    def open(self, session: Session) -> str:
        """The key with which the session's agent calls."""
        key = f"isotrain-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return key

    def end(self, key: str) -> None:
        """Later calls with this key are refused."""
        self._sessions.pop(key, None)

    def _session(self, request: web.Request) -> Session:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key.strip()) if kind.lower() == "bearer" else None
        if session is None:
            raise Refused("the key is not that of an episode under way", "invalid_api_key", 401)
        return session

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "isotrain"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session, body = self._session(request), await _body(request)
        return await self._answer(request, session, body, session.chat(chat_request(body)), chat_reply)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session, body = self._session(request), await _body(request)
        prompt = body.get("prompt")
        is_tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not is_tokens and not isinstance(prompt, str):
            raise Refused("prompt: a text or a list of token ids is needed")
        assert prompt is not None
        made = session.complete(prompt, *completion_limits(body))
        return await self._answer(request, session, body, made, text_reply)

    async def _answer(
        self,
        request: web.Request,
        session: Session,
        body: Mapping[str, Any],
        made: Awaitable[Completion],
        as_reply: _Reply,
    ) -> web.StreamResponse:
        completion = await made
        try:
            reply = as_reply(completion, int(time.time()), body)
            if not body.get("stream"):
                response = web.json_response(reply)
                await response.prepare(request)
                await response.write_eof()
                return response
            return await _streamed(request, reply, body)
        except BaseException:  # whatever it was, the agent has not got it
            session.unread(completion)
            raise

    async def _reward(self, request: web.Request) -> web.Response:
        session, body = self._session(request), await _body(request)
        session.reward(body.get("reward"), body.get("completion"))
        return web.json_response({"ok": True})


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        data = await request.read()
    except web.RequestPayloadError as error:  # such as one that is not compressed as its header says
        raise Refused(f"the body cannot be read: {error}") from None
    # Not in the character set that a header names: JSON has its own.
    return read_body(data)


async def _streamed(
    request: web.Request, reply: Mapping[str, Any], body: Mapping[str, Any]
) -> web.StreamResponse:
    """The whole turn at once: it is passed on when its last token is there."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for chunk in chunks(reply, body):
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as refused:
        message, code, status = str(refused), refused.code, refused.status
    except web.HTTPException as error:
        message, code, status = error.reason, "invalid_request_error", error.status
    except OSError:
        raise  # the client has gone
    except Exception as error:  # the agent cannot do anything about it
        if not isinstance(error, IsotrainError):  # those of the engine are told to the run as well
            logger.warning("rollout.agent: a call to %s failed: %r", request.path, error)
        message, code, status = f"{type(error).__name__}: {error}", "server_error", 500
    content = {"error": {"message": message, "type": code, "code": code, "param": None}}
    headers = {"x-should-retry": "false"}  # OpenAI's client heeds it
    return web.json_response(content, status=status, headers=headers)
