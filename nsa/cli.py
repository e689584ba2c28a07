"""`nsa <verb>`: command-line tools around training; each verb imports what it needs when called."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from nsa.constants import INTERRUPTED
from nsa.data.command import add_parser as add_data_parser
from nsa.engine.plan_command import add_parser as add_plan_parser
from nsa.evaluate.command import add_parser as add_eval_parser
from nsa.evaluate.generate import add_parser as add_generate_parser
from nsa.export.commands import add_export_parser, add_import_parser
from nsa.export.serve import add_serve_parser
from nsa.report.compare import add_parser as add_compare_parser
from nsa.report.report import add_parser as add_report_parser
from nsa.system import existing_or_resource, package_version, resource_path, user_path
from nsa.text import printable
from nsa.validation import Parser, positive_flags, reject_unknown_flags
from nsa.watchdog.command import add_parser as add_watch_parser
from nsa.watchdog.command import split_command
from nsa.withdrawn import VERBS

_M7C = 125_000_000  # parameters
_M7C_CHECKPOINTS = 10  # 50,000 steps, one every 5,000


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; ValueError and OSError become one line on stderr and exit code 2."""
    parser = _parser()
    flags, command = split_command(sys.argv[1:] if argv is None else argv)
    for words in (1, 2):  # a withdrawn verb has one word or two
        name = " ".join(flags[:words])
        if name in VERBS:
            parser.error(f"{name}: withdrawn in this version; {VERBS[name]}")
    args, unknown = parser.parse_known_args(flags)
    if args.verb == "train":
        args.arguments = unknown
    elif unknown:
        reject_unknown_flags(args.parser, unknown)
    if command:
        args.command = command
    try:
        code = args.run(args)
        print(end="", flush=True)  # raises BrokenPipeError here, not at exit
        return code
    except BrokenPipeError:  # `nsa … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, OSError) as error:
        print("nsa:", printable(str(error), keep="\n"), file=sys.stderr)
        return 2


def _parser() -> Parser:
    about = "Tools around training. To train: nsa train --num_gpus 2 m7c"
    parser = Parser(prog="nsa", description=about)
    version = package_version("nsa-m7c") or "(not installed)"
    parser.add_argument("--version", action="version", version=f"nsa {version}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb")

    about = "train with an installed recipe: nsa train [DeepSpeed's flags] m7c [the recipe's flags]"
    verbs.add_parser("train", help=about, add_help=False).set_defaults(run=_train)

    about = "validate a DeepSpeed JSON against the M7C recipe; print it with 'auto' resolved"
    codes = "Exit code: 0 if the recipe accepts the file, 2 with a line per key to change."
    check = verbs.add_parser("check", help=about, description=about, epilog=codes)
    about = "e.g. ds_configs/zero1_pcie.json"
    check.add_argument("ds_config", type=existing_or_resource, help=about)
    check.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    about = "override one setting of the recipe, e.g. train.micro_batch=4; repeatable"
    check.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=about)
    check.set_defaults(run=_check)

    about = "check this machine before a run"
    doctor = verbs.add_parser("doctor", help=about, description=about)
    add = doctor.add_argument
    about = "folder of the runs (default: runs)"
    add("--run-dir", type=user_path, default=Path("runs"), help=about)
    about = f"parameters of the model (default {_M7C:,}, M7C)"
    add("--parameters", type=int, default=_M7C, help=about)
    about = f"checkpoints that the run keeps (default {_M7C_CHECKPOINTS})"
    add("--checkpoints", type=int, default=_M7C_CHECKPOINTS, help=about)
    add("--ranks", type=int, help="ranks on this machine (default: one per GPU, or 2 without any)")
    add("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=_doctor)

    add_data_parser(verbs)
    add_report_parser(verbs)
    add_compare_parser(verbs)
    add_eval_parser(verbs)
    add_generate_parser(verbs)
    add_serve_parser(verbs)
    add_watch_parser(verbs)
    add_plan_parser(verbs)
    add_export_parser(verbs)
    add_import_parser(verbs)

    for verb in verbs.choices.values():
        verb.set_defaults(parser=verb)
    return parser


def _train(args: argparse.Namespace) -> int:
    """Become DeepSpeed's launcher, whose flags come before the recipe's name."""
    recipes = {path.stem: path for path in sorted(resource_path("recipes").glob("*.py"))}
    words = list(args.arguments)
    position = next((i for i, word in enumerate(words) if word in recipes), None)
    usage = f"nsa train [DeepSpeed's flags] RECIPE [its flags], RECIPE one of {', '.join(recipes)}"
    if {"-h", "--help"} & {*words[:position]}:
        print(f"usage: {usage}")
        return 0
    if position is None:
        raise ValueError(f"{' '.join(['train', *words])}: names no recipe; write {usage}")
    words[position] = str(recipes[words[position]])
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "deepspeed.launcher.runner", *words])


def _check(args: argparse.Namespace) -> int:
    from nsa.engine.config import RunConfig, resolve_config

    positive_flags(args, "ranks")
    # Importing DeepSpeed logs to stdout, which must only hold the JSON.
    with contextlib.redirect_stdout(io.StringIO()):
        from nsa.engine.ds_config import load_ds_config, resolve_ds_config, summary_line

        config = resolve_config(RunConfig(), assignments=args.set)
        raw, source = load_ds_config(args.ds_config), str(args.ds_config)
        resolved = resolve_ds_config(raw, config, world_size=args.ranks, source=source)
    print(json.dumps(resolved, indent=2))
    print(summary_line(resolved, args.ranks), file=sys.stderr)  # so that stdout is JSON
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from nsa.doctor.node import SKIP, Check, lines, node_checks, passed

    positive_flags(args, "parameters", "checkpoints", "ranks")
    checks = node_checks(
        args.run_dir, parameters=args.parameters, checkpoints=args.checkpoints, ranks=args.ranks
    )
    command = "deepspeed --num_gpus 2 recipes/m7c.py --until preflight"
    checks.append(Check("ranks", SKIP, f"code, all-reduce and kernels: {command}"))
    if args.json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        print(*lines(checks), sep="\n")
    return 0 if passed(checks) else 2
