"""``python -m benchmarks.peers``: measure servers side by side."""

from benchmarks.peers.bench import main
from modelport.loadtests.system import script

script.run(main)
