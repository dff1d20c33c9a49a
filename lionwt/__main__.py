"""The entry of the command; answers what needs no command line parser before importing one."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run the command line; returns the exit code."""
    if sys.argv[1:] in (["--version"], ["-V"]):
        from lionwt import __version__

        print(f"lionwt {__version__}")
        return 0
    # Looking for pydantic plugins reads the metadata of every installed package.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
    from lionwt.cli import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
