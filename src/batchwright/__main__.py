"""`python -m batchwright` is the `batchwright` command."""

from batchwright.cli.app import main

if __name__ == "__main__":
    main()
