"""Entry point of the console script: small, so that Ctrl-C during the first imports ends quietly too."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from spot_deploy.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
