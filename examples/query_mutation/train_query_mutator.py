"""Train a query mutator: `batchwright train query-mutator` as a script.

    python train_query_mutator.py --num-processes 16 --batch-size 8 --num-env-steps 10000
    python train_query_mutator.py --num-processes 16 --no-batching
    python train_query_mutator.py --target-model sim          # in seconds, with no model at all

Without a server it runs on the small model of `batchwright models get smollm2`; name yours with
--target-model ollama:NAME or URL#NAME, and see all flags with --help.
"""

import sys

from batchwright.cli.app import main

if __name__ == "__main__":
    sys.argv[1:1] = ["train", "query-mutator"]
    main()
