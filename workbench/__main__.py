"""`python -m firstlight.workbench`: the command line."""

from firstlight.workbench.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
