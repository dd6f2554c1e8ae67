"""`python -m wavefill` is the command `wavefill`."""

from wavefill.cli import main

if __name__ == "__main__":
    main()
