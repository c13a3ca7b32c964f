"""What compute-sanitizer watches of peer memory: two ranks on one GPU, one shot and two, with and without the norm."""

import sys

from test_peers import every_row_count

from engine import spawn

if __name__ == "__main__":
    sys.exit(spawn(every_row_count, 2, 80, [1, 3, 66]) != [[], []])
