"""The flags of the GPU benchmarks. Nothing heavy is imported to read them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from nsa.bench.shapes import FUNCTIONS, KINDS, SELECTIONS, lengths, names, shapes

LENGTHS = "1k,2k,4k,6k,8k,16k,32k,64k,128k"


def add_gpu_verbs(what: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The benchmarks made for a GPU; each runs on a CPU too, at small sizes."""
    kernels = _verb(what, "kernels", "each function of nsa.ops, on each backend")
    _sizes(kernels, "m7c,64x4x128", "2k,8k,64k", 65_536)
    kernels.add_argument("--backends", type=names, help="such as triton,blockwise,reference")
    kernels.add_argument(
        "--functions",
        type=_choice(*FUNCTIONS),
        default=",".join(FUNCTIONS),
        help="these alone",
    )

    module = _verb(what, "module", "whole NSA beside dense attention and other NSAs")
    _sizes(module, "m7c,16x4x64,64x4x128,paper", LENGTHS, 65_536)
    _backend(module)
    module.add_argument(
        "--selection",
        type=_choice(*SELECTIONS),
        default=",".join(SELECTIONS),
        help="do neighbouring queries choose blocks of their own, or mostly the same ones",
    )
    module.add_argument(
        "--kinds",
        type=_choice(*KINDS),
        default=",".join(KINDS),
        help="against dense attention, as fla computes it, the selected branch, its parts",
    )
    module.add_argument("--only", type=names, help="contenders to measure beside nsa, by name")
    module.add_argument("--plot", type=Path, help="draw the times there, as PNG")

    train = _verb(what, "train", "a training step of M7C, NSA beside dense")
    train.add_argument("--lengths", type=lengths, default="2k,8k,32k", help="tokens of a sequence")
    _tokens(train, 65_536)
    train.add_argument("--layers", type=int, default=12, help="transformer blocks")
    train.add_argument("--vocab", type=int, default=50_304, help="rows of the embedding")
    train.add_argument("--activation-checkpointing", default="none", help="as the model's setting")
    train.add_argument("--compile", action="store_true", help="both models through torch.compile")
    _backend(train)

    decode = _verb(what, "decode", "a token behind a cache, NSA beside dense, as the cache grows")
    long = "1k,2k,4k,8k,16k,32k,64k"
    decode.add_argument("--lengths", type=lengths, default=long, help=f"tokens (default {long})")
    decode.add_argument("--batches", type=lengths, default="1,8", help="sequences at a time (1,8)")
    decode.add_argument(
        "--tokens", type=int, default=524_288, help="no case with more of them in its caches"
    )
    decode.add_argument("--layers", type=int, default=12, help="transformer blocks")
    decode.add_argument("--vocab", type=int, default=50_304, help="rows of the embedding")
    _backend(decode)

    tune = _verb(what, "tune", "time the kernels' tile sizes on this GPU and keep the fastest")
    _sizes(tune, "m7c,16x4x64,64x4x128,paper", "4k,16k", 32_768)
    _backend(tune)


def add_comm_verb(what: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """What DeepSpeed's configs send over a link, and what that costs a step."""
    comm = what.add_parser("comm", help="what each DeepSpeed config sends, and what that costs")
    comm.add_argument("--config", nargs="+", help="names in ds_configs/; else all of them")
    comm.add_argument("--rates", type=_rates, default="1,4,full", help="Gbit/s (%(default)s)")
    comm.add_argument(
        "--accumulation", type=int, nargs="+", default=[1, 2, 8], help="micro-batches of a step"
    )
    comm.add_argument(
        "--variants",
        action="store_true",
        help="instead, other buckets and owners: what each change does",
    )
    comm.add_argument("--out", type=Path, help="keep it as JSON there, with a page and a picture")
    comm.add_argument("--show", type=Path, help="measure nothing: print a file's table of configs")


def add_ablations_verb(what: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The demo with parts of its attention changed or taken away, trained and timed."""
    from nsa.bench.ablations import VARIANTS

    about = "what each part of attention is good for: the demo trained without it"
    ablations = what.add_parser("ablations", help=about, description=about)
    ablations.add_argument("--runs", type=Path, default="runs/ablations", help="the runs' folders")
    ablations.add_argument("--steps", type=_at_least(1), default=300, help="of each (%(default)s)")
    ablations.add_argument(
        "--seeds", type=_seeds, default="1,2,3", help="with commas between (%(default)s)"
    )
    ablations.add_argument(
        "--variants",
        type=_choice(*VARIANTS),
        default=",".join(VARIANTS),
        help="with commas between (%(default)s)",
    )
    ablations.add_argument(
        "--jobs", type=_at_least(1), default=2, help="runs at a time, which share the processors"
    )
    ablations.add_argument(
        "--rounds", type=_at_least(2), default=20, help="steps of each that are timed"
    )
    ablations.add_argument("--out", type=Path, help="keep it as JSON there, with a page beside it")


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: write a whole number, {least} or more")
        return int(text)

    return number


def _seeds(text: str) -> list[int]:
    return list(dict.fromkeys(_at_least(0)(word) for word in text.split(",")))


def _rates(text: str) -> list[float | None]:
    """Gbit/s with commas between; `full` is as fast as the machine can."""
    rates = [None if word == "full" else float(word) for word in text.split(",")]
    if any(rate is not None and rate <= 0 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r}: write Gbit/s above 0, or full")
    return rates


def _verb(
    what: argparse._SubParsersAction[argparse.ArgumentParser], name: str, about: str
) -> argparse.ArgumentParser:
    verb = what.add_parser(name, help=about, description=about)
    verb.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    verb.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="bf16; on a CPU fp32")
    verb.add_argument(
        "--seconds", type=float, default=0.5, help="for each figure, about; three turns at least"
    )
    verb.add_argument("--rounds", type=int, default=30, help="most turns of a contender")
    verb.add_argument("--limit", type=float, help="begin no new case after so many seconds")
    verb.add_argument("--out", type=Path, help="write the figures there, as JSON, case by case")
    return verb


def _sizes(verb: argparse.ArgumentParser, which: str, long: str, tokens: int) -> None:
    verb.add_argument(
        "--shapes",
        type=shapes,
        default=which,
        help=f"m7c, 16x4x64, 64x4x128, paper, or heads x KV heads x sizes (default {which})",
    )
    verb.add_argument("--lengths", type=lengths, default=long, help=f"tokens (default {long})")
    _tokens(verb, tokens)


def _tokens(verb: argparse.ArgumentParser, tokens: int) -> None:
    verb.add_argument(
        "--tokens", type=int, default=tokens, help=f"of a batch, about (default {tokens})"
    )


def _backend(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--backend",
        choices=("auto", "triton", "blockwise", "reference"),
        help="who computes NSA: triton on a GPU, blockwise on a CPU",
    )


class _choice:
    """Names with commas between, each one of these."""

    def __init__(self, *known: str) -> None:
        self.known = known

    def __call__(self, text: str) -> list[str]:
        for name in names(text):
            if name not in self.known:
                raise argparse.ArgumentTypeError(
                    f"{name!r}: choose from {', '.join(self.known)}, with commas between"
                )
        return names(text)
