"""`python -m fusible`: see `fusible.cli`."""

from __future__ import annotations

import sys

#: What the extra `cli` brings.
EXTRA = ("typer", "rich", "matplotlib")


def main() -> int:
    """Runs the command line and returns its exit code."""
    try:
        if sys.argv[1:] == ["build"]:  # a plain installation can do this one too
            from fusible import build

            return build.main()
        from fusible.cli import run

        return run(sys.argv[1:])
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRA:
            raise
        print(f"fusible: the commands need {missing}; install it with: pip install 'fusible[cli]'", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
