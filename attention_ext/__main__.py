"""The command attention-ext, also python -m attention_ext."""

import os
import sys

import torch

from .command.arguments import parse
from .command.output import remark
from .command.timing import OUT_OF_MEMORY, reason_of

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console command; returns the exit status."""
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        if "device" in args and args.device.index is not None:
            torch.cuda.set_device(args.device)  # whose stream the events of a figure are on
        status: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        remark("attention-ext: interrupted")
        return 130
    except BrokenPipeError:  # whoever was to read it has read enough; Python would complain once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (RuntimeError, MemoryError) as error:
        reason = reason_of(error, [])
        if not reason.startswith(OUT_OF_MEMORY):
            raise
        remark(f"attention-ext {args.command}: {reason}; smaller sizes may fit")
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
