"""Chat templates, rendered with limits of time and memory.

A template is a program by the author of the model's folder, and a thread cannot be ended. So each
chat is rendered in a process of its own; a fork server, which imports once, starts it fast.
"""

from __future__ import annotations

import multiprocessing
import resource
import signal
from multiprocessing.connection import Connection
from typing import Any

from nsa.text import first_line
from nsa.untrusted import text_or_empty

TEMPLATE_SECONDS = 10.0  # CPU time
TEMPLATE_BYTES = 2**30  # of address space, in addition to what its process has at the start
TEMPLATE_CHARS = 2**24  # of the text


def render_chat(tokenizer: Any, messages: list[dict[str, Any]], **values: Any) -> str:
    """Return a chat's text up to the assistant's turn; the template reads `values` too.

    Raise a ValueError, one line, if the template fails or exceeds a limit.
    """
    arguments = {
        **tokenizer.special_tokens_map,
        **values,  # of a request, which may not replace the template or the messages
        "chat_template": tokenizer.get_chat_template(tools=values.get("tools")),
        "conversations": [messages],
        "add_generation_prompt": True,
    }
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "transformers.utils.chat_template_utils"])
    receiver, sender = context.Pipe(duplex=False)
    call = sender, TEMPLATE_SECONDS, arguments
    process = context.Process(target=_render, args=call, daemon=True)
    with receiver:
        process.start()
        sender.close()
        try:
            text, error = receiver.recv()
        except EOFError:  # the process was ended
            process.join()
            text, error = "", f"exit code {process.exitcode}"
            if process.exitcode == -signal.SIGPROF:
                error = f"TimeoutError: no text after {TEMPLATE_SECONDS:g} seconds"
    if error is not None:
        raise ValueError(f"the chat template ends with {error}")
    return str(text)


def _render(sender: Connection, seconds: float, arguments: dict[str, Any]) -> None:
    """Send the text and None, or "" and the error; the timer's signal ends this process."""
    from transformers.utils.chat_template_utils import render_jinja_template

    pages = int(text_or_empty("/proc/self/statm").split()[0])  # of this process's address space
    limit = pages * resource.getpagesize() + TEMPLATE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C prints nothing
    signal.setitimer(signal.ITIMER_PROF, seconds)
    text, error = "", None
    try:
        chats: Any = render_jinja_template(**arguments)[0]  # a text per conversation: here one
        if len(chats[0]) <= TEMPLATE_CHARS:
            text = chats[0]
        else:
            error = f"more than {TEMPLATE_CHARS:,} characters"
    except Exception as failure:  # a template may raise any
        error = f"{type(failure).__name__}: {first_line(failure)}"
    sender.send((text, error))
