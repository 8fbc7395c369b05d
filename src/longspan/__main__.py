"""`python -m longspan`, for example under `torchrun`."""

from longspan.cli.main import main

if __name__ == "__main__":
    main()
