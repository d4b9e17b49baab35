"""`python -m servers` is `pagedjax serve`: an entry point, above all layers."""

import sys

from pagedjax.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command("serve", sys.argv[1:], program="python -m servers"))
