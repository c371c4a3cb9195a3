"""``python -m exporters``: the same as ``modelport export``."""

from exporters.cli import export

if __name__ == "__main__":
    export(prog_name="python -m exporters")
