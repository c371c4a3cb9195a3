"""``python -m modelport``: the command ``modelport``."""

from modelport.cli import main

if __name__ == "__main__":
    main()
