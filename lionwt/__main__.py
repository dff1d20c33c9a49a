"""The entry of the command; answers what needs no command line parser before importing one."""

from __future__ import annotations

import gc
import os
import sys


def main() -> int:
    """Run the command line; returns the exit code."""
    _keep_standard_descriptors()
    if sys.argv[1:] in (["--version"], ["-V"]):
        return _version()
    from lionwt import signals

    signals.install()
    # A command lives shorter than garbage matters: what it imports must not be searched for any, again and again.
    gc.set_threshold(100_000, 20, 20)
    try:
        from lionwt.cli import run

        return run(sys.argv[1:])
    except signals.Interrupted as interruption:  # before there was an answer, or while it was printed
        return 128 + interruption.number
    finally:
        gc.freeze()  # nor must all of it be searched once more when the interpreter ends


def _version() -> int:
    from lionwt import __version__

    try:
        print(f"lionwt {__version__}", flush=True)
    except OSError:
        from lionwt import answers

        return answers.show(answers.of_text("lionwt", f"lionwt {__version__}"), as_json=False)
    return 0


def _keep_standard_descriptors() -> None:
    """A standard stream that the caller closed must not become the descriptor of a lock or a lease file."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        fd = os.dup(fd)
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
