"""`python -m servers` is `pagedjax serve`: a launch line of another engine needs only the module's name changed."""

import sys

from pagedjax.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command("serve", sys.argv[1:], program="python -m servers"))
