"""`nsa generate`: continue prompts with a run's model; print one text while it is generated."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from nsa.evaluate.chat import render_chat
from nsa.evaluate.command import add_run_arguments, parse_device, require_tokenizer
from nsa.system import user_path
from nsa.text import printable
from nsa.untrusted import short_repr

if TYPE_CHECKING:
    import torch

    from nsa.data.tokenizer import Tokenizer


def add_parser(verbs: Any) -> None:
    about = "continue prompts with a run's model"
    parser = verbs.add_parser("generate", help=about, description=about)
    add_run_arguments(parser)
    add = parser.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="the text to continue")
    about = "a file with a prompt; --file and --prompt can be repeated, all run as one batch"
    add("--file", action="append", default=[], type=user_path, metavar="F", help=about)
    add("--max-new-tokens", type=int, default=200, metavar="N", help="tokens at most (default 200)")
    about = "sampling temperature; 0: always the likeliest token (default 1)"
    add("--temperature", type=float, default=1.0, help=about)
    about = "sample from the fewest tokens with this total probability (default 1: all)"
    add("--top-p", type=float, default=1.0, help=about)
    add("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    about = "each prompt is a user's message, put into the tokenizer's chat template"
    add("--chat", action="store_true", help=about)
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> int:
    prompts = _read_prompts(args)
    try:
        import torch

        from nsa.data.tokenizer import stop_ids
        from nsa.engine.load_run import load_run
        from nsa.model.decode import check_sampling, generate

        names = ("max_new_tokens", "temperature", "top_p")
        sampling = {name: getattr(args, name) for name in names}
        check_sampling(**sampling)
        run = load_run(args.path, device=parse_device(args.device))
        tokenizer = require_tokenizer(str(args.path), run)
        ids = [torch.from_numpy(_prompt_ids(args, tokenizer, text)) for _, text in prompts]
        steps = generate(run.model, ids, **sampling, seed=args.seed, stop=stop_ids(tokenizer))
        print_texts(steps, [title for title, _ in prompts], tokenizer)
    except KeyboardInterrupt:
        print(flush=True)  # end the line
        raise
    return 0


def _prompt_ids(args: argparse.Namespace, tokenizer: Tokenizer, text: bytes) -> Any:
    """Return a prompt's ids, int64 [T]."""
    import numpy as np

    from nsa.data.tokenizer import HubTokenizer, load_pretrained, name_in_errors, tokenizer_folder

    if not args.chat:
        return tokenizer.with_start(tokenizer.encode(text)).astype("int64")
    pretrained = load_pretrained(tokenizer.name) if isinstance(tokenizer, HubTokenizer) else None
    if pretrained is None or not pretrained.chat_template:
        raise ValueError(
            f"--chat: the tokenizer {tokenizer.name!r} has no chat template; leave --chat out, or "
            "add chat_template.jinja to its folder"
        )
    message = {"role": "user", "content": text.decode("utf-8", "replace")}
    try:
        chat = render_chat(pretrained, [message])
    except ValueError as error:
        file = tokenizer_folder(tokenizer.name) / "chat_template.jinja"
        if not file.is_file():
            file = file.with_name("tokenizer_config.json")
        raise ValueError(f"{file}: {error}; leave --chat out, or change the template") from None
    with name_in_errors(f"data.tokenizer = {tokenizer.name!r}"):
        return np.array(pretrained(chat, add_special_tokens=False).input_ids, dtype=np.int64)


def _read_prompts(args: argparse.Namespace) -> list[tuple[str, bytes]]:
    """Return the title and the text of each prompt."""
    prompts = [(short_repr(text), text.encode("utf-8", "surrogateescape")) for text in args.prompt]
    for file in args.file:
        try:
            prompts.append((str(file), file.read_bytes()))
        except OSError as error:
            raise ValueError(f"--file {file}: {error.strerror}; name a file of text") from None
    if not prompts:
        raise ValueError("there is no prompt; give --prompt TEXT or --file F")
    for title, text in prompts:
        if not text:
            raise ValueError(f"the prompt {title} is empty; give at least one character")
    return prompts


def print_texts(steps: Iterable[torch.Tensor], titles: list[str], tokenizer: Tokenizer) -> None:
    """Print one text while it is generated; several texts at the end, below their titles.

    Titles look like those of the Unix command `head`. Each step holds a token per text, -1 after a
    text's end.
    """

    def write(text: str, end: str = "\n") -> None:
        if sys.stdout.isatty():  # a terminal obeys control characters; elsewhere text stays exact
            text = printable(text, "\n\t")
        print(text, end=end, flush=True)

    tokens = (step.tolist() for step in steps)
    if len(titles) == 1:
        for piece in decode_stream((token for (token,) in tokens), tokenizer):
            write(piece, end="")
        print(flush=True)
        return
    texts = zip(*tokens, strict=True)  # ids of each text
    for number, (title, ids) in enumerate(zip(titles, texts, strict=True)):
        if number:
            print()
        print(f"==> {printable(title)} <==")
        write("".join(decode_stream(ids, tokenizer)))


def decode_stream(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text that each token completes, and an incomplete character at the end.

    Some tokenizers drop the first space of the text that they decode. So pending tokens are decoded
    together with the previous piece, and the text of the previous piece is cut off.
    """
    previous: list[int] = []  # tokens of the previous piece
    pending: list[int] = []  # tokens whose last character may be incomplete
    text = ""  # of the pending tokens
    yielded = 0  # characters of `text` that were yielded

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens).decode("utf-8", errors="replace")

    for token in tokens:
        pending.append(token)
        text = decode(previous + pending)[len(decode(previous)) :]
        # Tokenizers decode an incomplete character to one or several of these marks.
        complete = len(text.rstrip("\ufffd"))
        yield text[yielded:complete]
        yielded = complete
        if text and complete == len(text):
            previous, pending, text, yielded = pending, [], "", 0
    yield text[yielded:]
