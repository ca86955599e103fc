"""A scripted OpenAI-compatible server on loopback: good answers, bad ones, and every way of giving none."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Step:
    """One response. With `body`, that is sent as it is; else a chat completion of `text`."""

    text: str | None = ""
    finish: str = "stop"
    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    refusal: str | None = None
    hangs_s: float = 0.0
    drops: bool = False  # closes the connection without a word
    only_streams: bool = False  # 504 to a question that does not ask for a stream
    breaks_stream: bool = False  # ends a stream in the middle


def error(status: int, message: str, **more: Any) -> Step:
    """An error as OpenAI words them."""
    headers = more.pop("headers", {})
    return Step(
        status=status, body=json.dumps({"error": {"message": message, **more}}).encode(), headers=headers
    )


class ChatServer:
    """Gives the steps in turn, the last one for ever; a step of text alone may be a plain string, or be made of the question.

    `asked` holds the bodies of all questions, `keys` what they had as authorization.
    """

    def __init__(
        self,
        *steps: Step | str | Callable[[dict[str, Any]], str],
        models: Any = None,
        tokens: tuple[int, int] | None = (1000, 100),
    ) -> None:
        self.steps: list[Step | Callable[[dict[str, Any]], str]] = [
            Step(text=s) if isinstance(s, str) else s for s in steps
        ]
        self.models = models
        self.tokens = tokens
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        script = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                script.keys.append(self.headers.get("authorization"))
                if script.models is None:
                    self._send(404, b"{}")
                elif isinstance(script.models, int):
                    self._send(script.models, b"{}")
                else:
                    self._send(200, json.dumps(script.models).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                script.asked.append(body)
                script.keys.append(self.headers.get("authorization"))
                step = script.steps[min(len(script.asked), len(script.steps)) - 1]
                if not isinstance(step, Step):
                    step = Step(text=step(body))
                if step.hangs_s:
                    time.sleep(step.hangs_s)
                if step.drops:
                    self.connection.close()
                elif step.only_streams and not body.get("stream"):
                    self._send(
                        504, b"<html><body>gateway timeout</body></html>", {"Content-Type": "text/html"}
                    )
                elif step.body is not None or step.status != 200:
                    self._send(step.status, step.body or b"", step.headers)
                elif body.get("stream"):
                    self._stream(step)
                else:
                    self._send(200, json.dumps(script.completion(step)).encode(), step.headers)

            def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _stream(self, step: Step) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                text = step.text or ""
                cut = len(text) // 2
                pieces = [(text[:cut], None)]
                if not step.breaks_stream:
                    pieces += [(text[cut:], None), ("", step.finish)]
                for piece, finish in pieces:
                    choice = {
                        "index": 0,
                        "delta": {"role": "assistant", "content": piece},
                        "finish_reason": finish,
                    }
                    self._event({"id": "1", "choices": [choice]})
                if not step.breaks_stream:
                    self._event({"id": "1", "choices": [], "usage": script.usage(step)})
                    self.wfile.write(b"data: [DONE]\n\n")
                self.close_connection = True

            def _event(self, document: Any) -> None:
                self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                """A client that was tired of waiting is no fault of the server."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def usage(self, step: Step) -> dict[str, Any] | None:
        if step.usage is not None or self.tokens is None:
            return step.usage
        prompt, completion = self.tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def completion(self, step: Step) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": step.text}
        if step.refusal is not None:
            message["refusal"] = step.refusal
        choice = {"index": 0, "finish_reason": step.finish, "message": message}
        found: dict[str, Any] = {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [choice],
        }
        usage = self.usage(step)
        return found if usage is None else {**found, "usage": usage}

    def prompts(self) -> list[str]:
        """The last message of each question."""
        return [str(a["messages"][-1]["content"]) for a in self.asked]

    def __enter__(self) -> ChatServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
