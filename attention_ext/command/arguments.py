"""The arguments of the command: subcommands, their options, an example in the help of each, and what is refused."""

import argparse
import difflib
from collections.abc import Iterable

import torch

from .._libraries import BUILD, CUDA_PROBLEM
from . import bench, explanation, info, problems, verify
from .cards import CARDS
from .cases import CASES, DTYPES, FOR_A_CPU, SIZES, Case, parse_shape

__all__ = ["parse"]

_SHORT = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32", "fp64": "float64"}
_ON_A_CARD = ("vae1024", "g512cgqa", "kb97", "d128c", "dec512")  # what bench runs where nothing is named
_DEFAULT = "run"


def _near(text: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(text, known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def _dtype(text: str) -> torch.dtype:
    name = _SHORT.get(text, text).removeprefix("torch.")
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(DTYPES)}, got '{text}'{_near(text, [*DTYPES, *_SHORT])}")
    return DTYPES[name]


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    """The sizes and how they were given, which is the call's name."""
    try:
        return text, parse_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _case(text: str) -> Case:
    if text not in CASES:
        hint = _near(text, CASES) or ("; sizes go to --shape" if "," in text else "")
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(CASES)}, got '{text}'{hint}")
    return CASES[text]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got '{text}'")
    return int(text)


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:NUMBER, got '{text}'")
    if device.type == "cpu":
        return torch.device("cpu")  # without an index
    if CUDA_PROBLEM is not None:
        raise argparse.ArgumentTypeError(CUDA_PROBLEM)
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        sees = f"torch {torch.__version__} sees {torch.cuda.device_count() or 'no'} CUDA devices"
        raise argparse.ArgumentTypeError(f"{sees}, got '{text}'")
    return device


def _default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and CUDA_PROBLEM is None else "cpu")


def _with_calls(parser: argparse.ArgumentParser) -> None:
    """The options of what is about calls of attention."""
    parser.add_argument("names", nargs="*", type=_case, metavar="CASE", help=f"a named call: {', '.join(CASES)}")
    parser.add_argument(
        "--shape", dest="shapes", action="append", type=_shape, default=[], metavar=SIZES,
        help="sizes of a call: batch, query heads, key heads, queries, keys, head dim; as a seventh Ev, the values' head dim, if "
        "it is another. Hk below Hq is a call with enable_gqa=True. May be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", type=_dtype, help=f"{', '.join(DTYPES)}; default the named call's, of --shape bfloat16, on a CPU float32"
    )
    parser.add_argument("--causal", action="store_true", help="query i sees keys 0 to i")


def _with_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", type=_device, default=_default_device(), help="cpu, cuda or cuda:NUMBER; default %(default)s")


def _with_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="JSON on stdout; progress and remarks go to stderr")


def _add_run(parser: argparse.ArgumentParser) -> None:
    full = problems.FULL
    parser.add_argument("--problem", choices=("attention", "linear", "both"), default="both", help="default %(default)s")
    _with_device(parser)
    parser.add_argument("--dtype", type=_dtype, help=f"of attention: {', '.join(DTYPES)}; default float16")
    parser.add_argument("--batch", type=_positive, help=f"default {full['batch']}, on a CPU 1")
    parser.add_argument("--heads", type=_positive, help=f"default {full['heads']}")
    parser.add_argument("--length", type=_positive, help=f"queries and keys, default {full['length']}")
    parser.add_argument("--head-dim", type=_positive, help=f"default {full['head_dim']}")
    parser.add_argument("--causal", action="store_true", help="query i sees keys 0 to i")
    parser.add_argument("--rows", type=_positive, help=f"of linear, default {full['rows']}, on a CPU 128")
    parser.add_argument("--features", type=_positive, help=f"of linear, default {full['features']}, on a CPU 1024")
    parser.add_argument("--repeat", type=_positive, help="timed calls of each operator, default 20, on a CPU 3")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _with_calls(parser)
    _with_device(parser)
    parser.add_argument("--backward", action="store_true", help="forward and backward together, as in training")
    parser.add_argument("--repeat", type=_positive, help="timed calls of each row; default what a second has time for, 3 to 30")
    _with_json(parser)
    parser.add_argument("--plot", metavar="FILE", help="a picture, .svg or .png (needs matplotlib)")
    parser.add_argument("--from", dest="record", metavar="FILE", help="shows what --json has written before, measures nothing")


def _add_explain(parser: argparse.ArgumentParser) -> None:
    _with_calls(parser)
    parser.add_argument("--backward", action="store_true", help="a call whose operands require a gradient")
    where = parser.add_mutually_exclusive_group()
    _with_device(where)  # type: ignore[arg-type]
    where.add_argument("--card", choices=tuple(CARDS), help="a card that need not be there")
    _with_json(parser)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _with_device(parser)
    parser.add_argument("--all", action="store_true", help="a row for each call")
    _with_json(parser)


SUBCOMMANDS = {  # name: (what it does, what adds its options, examples, what runs it)
    "run": (
        "two KernelBench problems next to PyTorch (the default)",
        _add_run,
        ("attention-ext --problem attention --causal", "attention-ext run --device cpu --repeat 1"),
        problems.run,
    ),
    "bench": (
        "times of a call: this package, PyTorch's operator and each of its back ends, three calls (q k^T, softmax, times v)",
        _add_bench,
        ("attention-ext bench g512cgqa kb97", "attention-ext bench --shape 1,32,8,4096,4096,512 --causal --json > call.json"),
        bench.run,
    ),
    "verify": (
        "errors against float64 over a spread of calls on this machine, next to PyTorch's own; exit status 1 if one is too large",
        _add_verify,
        ("attention-ext verify", "attention-ext verify --device cpu --all"),
        verify.run,
    ),
    "explain": (
        "which kernel a call would run, and why; runs nothing",
        _add_explain,
        ("attention-ext explain --shape 1,32,8,4096,4096,512 --causal", "attention-ext explain --card h200"),
        explanation.run,
    ),
    "info": ("what is installed, which card is there, and what it gains", _with_json, ("attention-ext info",), info.run),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attention-ext",
        description="Is attention_ext faster here, is it right, and what would run?",
        epilog="attention-ext SUBCOMMAND --help has the options of each and an example. Without one it is run.",
    )
    version = f"attention-ext {BUILD.version}, torch {torch.__version__}"
    parser.add_argument("--version", action="version", version=version)
    parts = parser.add_subparsers(dest="command", metavar="SUBCOMMAND", required=True)
    for name, (what, add, examples, run) in SUBCOMMANDS.items():
        epilog = "\n  ".join(["examples:", *examples])
        form = argparse.RawDescriptionHelpFormatter
        part = parts.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.", epilog=epilog, formatter_class=form)
        add(part)
        part.set_defaults(run=run, error=part.error)
    return parser


def _chosen_cases(args: argparse.Namespace) -> list[Case]:
    """Those of the names and shapes, in the dtype and with the causal mask that were asked for."""
    usual = torch.float32 if args.device.type == "cpu" and not getattr(args, "card", None) else torch.bfloat16
    of_shapes = [Case(name, B, Hq, Hk, L, S, E, usual, False, Ev) for name, (B, Hq, Hk, L, S, E, Ev) in args.shapes]
    return [case.with_options(args.dtype, args.causal) for case in (*args.names, *of_shapes)]


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments; args.run(args) is what they ask for."""
    first = argv[0] if argv else ""
    if not first or (first.startswith("-") and first not in ("-h", "--help", "--version")):
        argv = [_DEFAULT, *argv]
    elif not first.startswith("-") and first not in SUBCOMMANDS:
        _parser().error(f"expected one of {', '.join(SUBCOMMANDS)}, got '{first}'{_near(first, SUBCOMMANDS)}")
    args = _parser().parse_args(argv)
    if args.command == "run" and args.rows == 1:
        args.error("argument --rows: training takes more than one")
    if "shapes" in args:
        args.cases = _chosen_cases(args)
    if args.command == "bench":
        if args.record is not None and (args.cases or args.backward or args.repeat):
            args.error("argument --from: measures nothing, so there is nothing to name or to choose")
        if not args.cases:
            default = _ON_A_CARD if args.device.type == "cuda" else FOR_A_CPU
            args.cases = [CASES[name].with_options(args.dtype, args.causal) for name in default]
    return args
