"""``python -m exporters``: the same as ``modelport export``."""

from modelport.exporters.cli.export import export

if __name__ == "__main__":
    export(prog_name="python -m exporters")
