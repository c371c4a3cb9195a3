"""``python -m benchmarks.peers``: measure servers side by side."""

from benchmarks import script
from benchmarks.peers.bench import main

script.run(main)
