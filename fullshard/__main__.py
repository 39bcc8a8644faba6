"""`python -m fullshard` is the `fullshard` command. Listens for stop signals before anything else is imported.

Must not do anything else.
"""

from __future__ import annotations

import sys

from fullshard.launch import signals


def main() -> None:
    """The `fullshard` command."""
    # Other commands remove their unfinished files as they exit; only training has exit code 75.
    if sys.argv[1:2] == ["train"]:
        signals.listen()
    from fullshard.cli import main as command

    command()


if __name__ == "__main__":
    main()
