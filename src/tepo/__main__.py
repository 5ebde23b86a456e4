"""`python -m tepo`."""

from tepo.cli import main

if __name__ == "__main__":
    main()
