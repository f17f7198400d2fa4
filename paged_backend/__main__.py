"""``python -m paged_backend``: the command line."""

from paged_backend.cli.app import run

if __name__ == "__main__":
    run()
