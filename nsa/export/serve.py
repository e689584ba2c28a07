"""`nsa serve`: OpenAI-compatible HTTP server of one model, by transformers' request handlers.

    POST /v1/chat/completions, /v1/completions   streamed too
    GET  /v1/models, /health

transformers' own command also loads whatever model a request names; this one has no such route.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import socket
import sys
from collections.abc import Awaitable, Callable
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from nsa.evaluate.chat import render_chat
from nsa.evaluate.command import add_run_arguments, parse_device
from nsa.system import LOOPBACK
from nsa.text import first_line

RENDERED = "{{ messages[0].content }}"  # template of a chat already rendered, by `render_chat`


def add_serve_parser(verbs: Any) -> None:
    about = "answer OpenAI's chat completions and completions over HTTP with a model"
    parser = verbs.add_parser("serve", help=about, description=about)
    add_run_arguments(parser)
    about = "address to listen on; any but localhost lets others use the model (%(default)s)"
    parser.add_argument("--host", default="localhost", metavar="NAME", help=about)
    about = "0: a free one (default 8,000)"
    parser.add_argument("--port", type=int, default=8_000, help=about)
    parser.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    try:
        import fastapi  # noqa: F401 - optional for transformers, required here
        import openai  # noqa: F401
        import transformers.cli.serving.completion  # noqa: F401 - of transformers 5.20 and newer
        import uvicorn
    except ImportError as error:
        raise ValueError(f"nsa serve: {first_line(error)}; pip install 'nsa-m7c[serve]'") from None
    with _listen(args.host, args.port) as listener:
        served = ServedModel(args.path, args.device)
        port = listener.getsockname()[1]
        if args.host not in LOOPBACK:
            print(f"nsa: warning: --host {args.host}: no password is asked", file=sys.stderr)
        print(f"{served.force_model}: http://{args.host}:{port}/v1 (Ctrl-C ends it)", flush=True)
        uvicorn.Server(uvicorn.Config(build_app(served))).run([listener])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise a ValueError if there can be none."""
    if not 0 <= port < 2**16:
        raise ValueError(f"--port {port}: must be from 0 to {2**16 - 1:,}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ValueError(
            f"--host {host} --port {port}: cannot listen there ({first_line(error)}); give another"
        ) from None


class ServedModel:
    """One model and its tokenizer, as the `ModelManager` of transformers' handlers.

    A folder of transformers, such as an export, is loaded directly; a run or an import through a
    temporary export. Weights are safetensors, and no code of the folder runs.
    """

    def __init__(self, path: Path, device: str | None = None) -> None:
        from nsa.export.from_hf import CONFIG, read_model
        from nsa.export.to_hf import export

        self.force_model = path.resolve().name  # the only model name in requests
        target = parse_device(device)
        if (path / CONFIG).is_file():
            read_model(path)  # refuses what this package does not know
            self._load(path, target)
            return
        with TemporaryDirectory() as folder:
            with contextlib.redirect_stdout(io.StringIO()):  # hides what `export` prints
                exported = export(path, Path(folder) / self.force_model)
            self._load(exported, target)

    def _load(self, folder: Path, device: Any) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        import nsa.model.hf  # noqa: F401 - registers the model
        from nsa.data.tokenizer import load_pretrained

        logging.disable_progress_bar()
        logging.set_verbosity_error()  # else a line for each request
        self.tokenizer = load_pretrained(f"hf:{folder}")
        # For the handlers; no template of the folder runs in this process.
        self.processor = copy(self.tokenizer)
        self.processor.chat_template = RENDERED
        self.processor.response_template = None
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype="auto",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
        except Exception as error:  # of transformers, safetensors or PyTorch
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise ValueError(f"{folder}: cannot be loaded: {reason}; export it again") from None
        # transformers' defaults ignore temperature and top_p, and sample from only 50 tokens.
        model.generation_config.do_sample = True
        model.generation_config.top_k = model.generation_config.top_k or 0
        self.model = model.to(device).eval()

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        return self.model, self.processor

    @staticmethod
    def process_model_name(name: str) -> str:
        return name

    @staticmethod
    def get_model_modality(*_: Any, **__: Any) -> Any:
        from transformers.cli.serving.utils import Modality

        return Modality.LLM


def build_app(served: ServedModel) -> Any:
    """Return the FastAPI application; an error in a request is one line of JSON with status 400."""
    from fastapi import FastAPI, HTTPException
    from fastapi.responses import JSONResponse
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.utils import GenerationState, Modality

    from nsa.data.tokenizer import is_library_error

    app = FastAPI(openapi_url=None)
    state = GenerationState()

    def refusal(message: str, status: int) -> JSONResponse:
        kind = "invalid_request_error"
        return JSONResponse({"error": {"message": message, "type": kind}}, status)

    async def respond(handle: Callable[..., Awaitable[Any]], body: dict[str, Any]) -> Any:
        try:
            return await handle(body, str(uuid4()))
        except HTTPException as error:
            return refusal(str(error.detail), error.status_code)
        except BaseException as error:  # from a bad template or value, or a tokenizer's panic
            if not is_library_error(error):
                raise
            return refusal(f"{type(error).__name__}: {first_line(error)}", 400)

    manager: Any = served
    chat = ChatCompletionHandler(manager, state)
    completion = CompletionHandler(manager, state)
    rendering = asyncio.Lock()  # one at a time: each may take TEMPLATE_BYTES

    async def handle_chat(body: dict[str, Any], request_id: str) -> Any:
        messages = chat.get_processor_inputs_from_messages(body["messages"], Modality.LLM)
        values = {"tools": body.get("tools"), **body.pop("chat_template_kwargs", {})}
        async with rendering:
            text = await asyncio.to_thread(render_chat, served.tokenizer, messages, **values)
        body["messages"] = [{"role": "user", "content": text}]
        return await chat.handle_request(body, request_id)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: dict) -> Any:
        if not served.tokenizer.chat_template:
            return refusal("the model has no chat template; use /v1/completions", 400)
        return await respond(handle_chat, body)

    @app.post("/v1/completions")
    async def completions(body: dict) -> Any:
        return await respond(completion.handle_request, body)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": served.force_model, "object": "model", "created": 0, "owned_by": "nsa"}
        return {"object": "list", "data": [model]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app
