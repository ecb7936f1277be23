"""``python -m lightning_ntp`` is ``ntp``."""

from lightning_ntp.cli import main

if __name__ == "__main__":
    main()
