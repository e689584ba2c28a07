"""`nsa generate`: continue prompts with a run's model; print the text while it is generated."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.evaluate.command import add_run_arguments, parse_device, require_tokenizer
from nsa.untrusted import printable, short

if TYPE_CHECKING:
    import torch

    from nsa.data.tokenizer import Tokenizer
    from nsa.model import LanguageModel

LONG_PROMPT = 8_192  # tokens of all prompts; shorter ones are read in seconds


def add_parser(verbs: Any) -> None:
    about = "continue prompts with a run's model; print the text while it is generated"
    parser = verbs.add_parser("generate", help=about, description=about)
    add_run_arguments(parser)
    add = parser.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="the text to continue")
    about = "a file with a prompt; --file and --prompt can be repeated, all run as one batch"
    add("--file", action="append", default=[], type=Path, metavar="F", help=about)
    add("--max-new-tokens", type=int, default=200, metavar="N", help="tokens at most (default 200)")
    about = "sampling temperature; 0: always the likeliest token (default 1)"
    add("--temperature", type=float, default=1.0, help=about)
    about = "sample from the fewest tokens with this total probability (default 1: all)"
    add("--top-p", type=float, default=1.0, help=about)
    add("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> int:
    prompts = _read_prompts(args)
    try:
        import torch

        from nsa.engine.load_run import load_run
        from nsa.model.decode import check_sampling, generate

        check_sampling(args.max_new_tokens, args.temperature, args.top_p)
        run = load_run(args.path, device=parse_device(args.device))
        tokenizer = require_tokenizer(str(args.path), run)
        ids = [torch.from_numpy(tokenizer.encode(text).astype("int64")) for _, text in prompts]
        show_prefill(run.model, sum(map(len, ids)))
        steps = generate(
            run.model,
            ids,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.seed,
            stop=tokenizer.eos_id,
        )
        stream_texts(steps, [title for title, _ in prompts], tokenizer)
    except KeyboardInterrupt:
        print(flush=True)  # end the line
        raise
    return 0


def _read_prompts(args: argparse.Namespace) -> list[tuple[str, bytes]]:
    prompts = [(short(text), text.encode("utf-8", "surrogateescape")) for text in args.prompt]
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


def show_prefill(model: LanguageModel, tokens: int) -> None:
    """Show the layers that have read a long prompt: on a CPU, it takes seconds per layer."""
    if tokens < LONG_PROMPT:
        return
    from tqdm import tqdm

    bar = tqdm(total=len(model.blocks), desc=f"reading {tokens:,} tokens", unit="layer")

    def advance(*_: object) -> None:
        bar.update()
        if bar.n == bar.total:
            bar.close()
            for hook in hooks:
                hook.remove()

    hooks = [block.register_forward_hook(advance) for block in model.blocks]


class StreamDecoder:
    """Decodes tokens one at a time; returns a character once its last token is added."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # context tokens, then those of the text being decoded
        self._context = 0  # the number of context tokens
        self._emitted = 0  # characters of the current text that were returned

    def add(self, token: int) -> str:
        """Return the text that `token` completes."""
        self._ids.append(token)
        # Decode with context: some tokenizers drop the first space of a text.
        text = self._decode(self._ids)[len(self._decode(self._ids[: self._context])) :]
        # Tokenizers decode an incomplete character to one or several of these marks.
        complete = len(text.rstrip("\ufffd"))
        piece = text[self._emitted : complete]
        if text and complete == len(text):
            self._ids, self._emitted = self._ids[self._context :], 0
            self._context = len(self._ids)
        else:
            self._emitted += len(piece)
        return piece

    def flush(self) -> str:
        """Return the incomplete character at the end."""
        context = self._decode(self._ids[: self._context])
        return self._decode(self._ids)[len(context) + self._emitted :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids).decode("utf-8", errors="replace")


def stream_texts(steps: Iterable[torch.Tensor], titles: list[str], tokenizer: Tokenizer) -> None:
    """Print the first text while it is generated, then the others, which are buffered until then.

    Several texts are printed below their titles, as `head` prints files.
    """
    decoders = [StreamDecoder(tokenizer) for _ in titles]
    buffers, running = [""] * len(titles), [True] * len(titles)
    current = 0
    terminal = sys.stdout.isatty()  # obeys control characters; elsewhere the text stays exact

    def print_title() -> None:
        if current < len(titles) > 1:
            title = printable(titles[current])
            print(f"{chr(10) if current else ''}==> {title} <==", flush=True)

    def print_buffers() -> None:
        nonlocal current
        while current < len(titles):
            text = buffers[current]
            print(printable(text, "\n\t") if terminal else text, end="", flush=True)
            buffers[current] = ""
            if running[current]:
                return
            print(flush=True)
            current += 1
            print_title()

    print_title()
    for tokens in steps:
        for row, token in enumerate(tokens.tolist()):
            if running[row]:
                running[row] = token != tokenizer.eos_id
                decoder = decoders[row]
                buffers[row] += decoder.add(token) if running[row] else decoder.flush()
        print_buffers()
    for row, decoder in enumerate(decoders):
        buffers[row] += decoder.flush() if running[row] else ""
        running[row] = False
    print_buffers()
