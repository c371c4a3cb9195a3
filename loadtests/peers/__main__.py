from loadtests import program
from loadtests.peers.bench import main

program.run(main)
