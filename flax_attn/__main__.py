"""`python -m flax_attn` is `flax-attn`."""

import sys

if __name__ == "__main__":
    # `python -m` puts the current folder first, where a file of the user's may have the name of a
    # standard module. The command looks there last, for packages that are nowhere else.
    if not sys.flags.safe_path:
        sys.path.pop(0)

    from .command.cli import main

    raise SystemExit(main())
