from modelport.loadtests import program
from modelport.loadtests.peers.bench import main

program.run(main)
