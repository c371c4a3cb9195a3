import sys

from loadtests.peers.bench import main

sys.exit(main())
