"""Train a query mutator: `batchwright train query-mutator` as a script.

    python train_query_mutator.py --num-processes 16 --batch-size 8 --num-env-steps 10000
    python train_query_mutator.py --num-processes 16 --no-batching
    python train_query_mutator.py --target-model sim          # seconds, no model needed

The default is the small model of `batchwright models get smollm2`; use --target-model qwen2.5:3b
for one of Ollama, URL#NAME for any other, and --help for all flags.
"""

import sys

from batchwright.cli.app import main

if __name__ == "__main__":
    sys.argv[1:1] = ["train", "query-mutator"]
    main()
