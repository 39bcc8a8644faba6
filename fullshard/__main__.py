"""`python -m fullshard` is the `fullshard` command. Must not do anything else."""

from __future__ import annotations

from fullshard.cli import main

if __name__ == "__main__":
    main()
