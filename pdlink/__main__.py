"""Owns `python -m pdlink`, which is the `pdlink` command."""

from pdlink.cli.main import run

if __name__ == "__main__":
    run()
