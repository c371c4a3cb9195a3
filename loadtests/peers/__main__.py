"""``python -m modelport.loadtests.peers``: measure servers side by side."""

from modelport.loadtests import script
from modelport.loadtests.peers.bench import main

script.run(main)
