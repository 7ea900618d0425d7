"""`python -m moments`, the command `moments`."""

from .cli import main

if __name__ == "__main__":
    main()
