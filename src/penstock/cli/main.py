"""The entry point of the command `penstock`.

Owns: `main`. If typer or rich is not installed, it prints how to install them.
"""

import sys

from penstock.cli.failures import INTERRUPTED, MISSING_EXTRA


def main() -> None:
    """Run the command line and end the process with its exit code."""
    try:
        from penstock.cli.app import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("rich", "typer"):
            raise
        print(f"penstock: the command line needs {missing}, which is not installed; pip install 'penstock[cli]'", file=sys.stderr)
        sys.exit(MISSING_EXTRA)
    except KeyboardInterrupt:  # during the import
        sys.exit(INTERRUPTED)
    app(prog_name="penstock")
