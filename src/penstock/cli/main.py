"""The way in: `penstock` as a command.

Owns: `main`. It works also when typer and rich are not installed; then it says how to install them.
"""

import sys

from penstock.cli.failures import INTERRUPTED, MISSING_EXTRA


def main() -> None:
    """Run the command that the arguments name, and end the process with its exit code."""
    try:
        from penstock.cli.app import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("rich", "typer"):
            raise
        print(f"penstock: the command line needs {missing}, which is not installed; pip install 'penstock[cli]'", file=sys.stderr)
        sys.exit(MISSING_EXTRA)
    except KeyboardInterrupt:  # while it was still loading
        sys.exit(INTERRUPTED)
    app(prog_name="penstock")


if __name__ == "__main__":
    main()
