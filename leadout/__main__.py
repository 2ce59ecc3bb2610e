"""``python -m leadout``: the same as the ``leadout`` command."""

from leadout.cli import main

if __name__ == "__main__":
    main()
