"""What compute-sanitizer watches of peer memory: two ranks on one GPU, one shot and two, with and without the norm."""

import sys

from test_peers import every_row_count

from engine import spawn

if __name__ == "__main__":
    wrong = spawn(every_row_count, 2, {80: [1, 3, 66], 7168: [2]})
    sys.exit(f"wrong: {wrong}" if any(wrong) else 0)
