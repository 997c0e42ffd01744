"""``python -m tests.train.crash``: see ``matrix``, which processes of its own import by that name."""

from tests.train.crash.matrix import main

if __name__ == "__main__":
    raise SystemExit(main())
