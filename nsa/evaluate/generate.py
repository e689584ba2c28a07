"""`nsa generate`: the text with which a run goes on, as it comes."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from reprlib import repr as short
from typing import TYPE_CHECKING, Any

from nsa.evaluate.command import add_run, chosen_device, tokenizer_of

if TYPE_CHECKING:
    import torch

    from nsa.data.tokenizer import Tokenizer


def add_parser(verbs: Any) -> None:
    """Add `generate` to the verbs of `nsa`."""
    about = "go on with a text as a run would, and print what it writes as it comes"
    parser = verbs.add_parser("generate", help=about, description=about)
    add_run(parser)
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="what to go on with"
    )
    parser.add_argument(
        "--file",
        action="append",
        default=[],
        type=Path,
        metavar="F",
        help="a file with a prompt; it and --prompt can be given several times, all go at once",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=200, metavar="N", help="where to end (default 200)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="below 1 likelier tokens come more often; 0: always the likeliest (default 1)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="draw from the fewest tokens that together have this probability (default 1: all)",
    )
    parser.add_argument("--seed", type=int, default=0, help="another one, another text (default 0)")
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> int:
    prompts = _prompts(args)
    try:
        import torch

        from nsa.engine.load_run import load_run
        from nsa.model.decode import check_sampling, generate

        check_sampling(args.max_new_tokens, args.temperature, args.top_p)
        run = load_run(args.place, device=chosen_device(args.device))
        tokenizer = tokenizer_of(str(args.place), run)
        ids = [torch.from_numpy(tokenizer.encode(text).astype("int64")) for _, text in prompts]
        steps = generate(
            run.model,
            ids,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.seed,
            stop=tokenizer.eos_id,
        )
        show_as_it_comes(steps, [name for name, _ in prompts], tokenizer)
    except KeyboardInterrupt:
        print(flush=True)  # what comes next begins on a line of its own
        raise
    return 0


def _prompts(args: argparse.Namespace) -> list[tuple[str, bytes]]:
    """What each prompt is called, and its text; those of --prompt first."""
    prompts = [(short(text), text.encode("utf-8", "surrogateescape")) for text in args.prompt]
    for file in args.file:
        try:
            prompts.append((str(file), file.read_bytes()))
        except OSError as error:
            reason = error.strerror
            raise ValueError(f"--file {file}: {reason}; name a file of text") from None
    if not prompts:
        raise ValueError("there is nothing to go on with; give --prompt TEXT or --file F")
    for name, text in prompts:
        if not text:
            raise ValueError(f"the prompt {name} is empty; a run goes on with a text's beginning")
    return prompts


class Spelling:
    """Tokens in, text out: of a character that several tokens spell nothing before the last."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # those that the newest text is of, and some before them
        self._known = 0  # how many of them are those before
        self._shown = 0  # how many characters of the newest text are out

    def add(self, token: int) -> str:
        """What `token` adds to the text."""
        self._ids.append(token)
        # Decoded with what stands before it: some tokenizers leave out a text's first space.
        new = self._spelled(self._ids)[len(self._spelled(self._ids[: self._known])) :]
        # Of a character that is not whole some tokenizers make one such mark, and some several.
        sure = len(new.rstrip("\ufffd"))
        whole = sure == len(new)
        piece = new[self._shown : sure]
        if whole and new:
            self._ids, self._shown = self._ids[self._known :], 0
            self._known = len(self._ids)
        else:
            self._shown += len(piece)
        return piece

    def rest(self) -> str:
        """What is left of a character when no token follows any more."""
        known = self._spelled(self._ids[: self._known])
        return self._spelled(self._ids)[len(known) + self._shown :]

    def _spelled(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids).decode("utf-8", errors="replace")


def show_as_it_comes(
    steps: Iterable[torch.Tensor], titles: list[str], tokenizer: Tokenizer
) -> None:
    """Print the first text while it is written, then those that were written meanwhile.

    Where there are several each has its title above it, as `head` has it for several files.
    """
    spellings = [Spelling(tokenizer) for _ in titles]
    waiting, running = [""] * len(titles), [True] * len(titles)
    current = 0

    def title() -> None:
        if current < len(titles) > 1:
            print(f"{chr(10) if current else ''}==> {titles[current]} <==", flush=True)

    def show() -> None:
        nonlocal current
        while current < len(titles):
            print(waiting[current], end="", flush=True)
            waiting[current] = ""
            if running[current]:
                return
            print(flush=True)
            current += 1
            title()

    title()
    for tokens in steps:
        for row, token in enumerate(tokens.tolist()):
            if running[row]:
                running[row] = token != tokenizer.eos_id
                spelling = spellings[row]
                waiting[row] += spelling.add(token) if running[row] else spelling.rest()
        show()
    for row, spelling in enumerate(spellings):
        waiting[row] += spelling.rest() if running[row] else ""
        running[row] = False
    show()
