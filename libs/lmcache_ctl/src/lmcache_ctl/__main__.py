"""`lmcachectl`, and `python -m lmcache_ctl`."""

import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the process's command line. Ctrl-C ends it silently, even during imports, which take the
    longest.

    Raises:
        SystemExit: Always, with the exit code.
    """
    try:
        from lmcache_ctl.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
