"""`python -m keel` is the `keel` command."""

from keel.cli import main

if __name__ == "__main__":
    main()
