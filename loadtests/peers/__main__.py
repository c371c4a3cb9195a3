"""``python -m modelport.loadtests.peers``: measure servers side by side."""

from modelport.loadtests.peers.bench import main
from modelport.loadtests.system import script

script.run(main)
